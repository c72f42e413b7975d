# Sets LOCKSTEP_HAS_MPI: whether the mpi backend is built. It takes an MPI of
# this machine; AUTO is ON where one is found.
set(LOCKSTEP_HAS_MPI OFF)

if(LOCKSTEP_WITH_MPI)
  enable_language(C)  # for MPI's C interface
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(LOCKSTEP_HAS_MPI ON)
    # C++ programs that use the C interface need not link MPI's C++ one.
    target_compile_definitions(MPI::MPI_C INTERFACE
      OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
    message(STATUS "MPI ${MPI_C_VERSION} is at ${MPI_C_LIBRARIES}")
  elseif(LOCKSTEP_WITH_MPI STREQUAL "AUTO")
    message(STATUS "MPI is off: none was found")
  else()
    message(FATAL_ERROR "LOCKSTEP_WITH_MPI=${LOCKSTEP_WITH_MPI}, but no MPI "
                        "was found: install one or name its compiler by "
                        "MPI_C_COMPILER")
  endif()
else()
  message(STATUS "MPI is off: LOCKSTEP_WITH_MPI=${LOCKSTEP_WITH_MPI}")
endif()
