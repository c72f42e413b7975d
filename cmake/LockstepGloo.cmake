# Sets LOCKSTEP_HAS_GLOO: whether the gloo backend is built. libtorch carries
# Gloo but not its headers, so our declarations of it are tried: compiled,
# linked and run. A link alone would not notice a changed virtual table.
set(LOCKSTEP_GLOO_DECLARATIONS
    ${CMAKE_CURRENT_SOURCE_DIR}/src/comm/backends/gloo/declarations)
set(LOCKSTEP_HAS_GLOO OFF)

function(lockstep_probe_gloo)
  set(probed "${Torch_VERSION} ${TORCH_INSTALL_PREFIX}")
  if(LOCKSTEP_GLOO_PROBED STREQUAL probed)
    return()
  endif()
  message(STATUS "Probing the Gloo inside libtorch")
  set(includes ${TORCH_INCLUDE_DIRS} ${LOCKSTEP_GLOO_DECLARATIONS})
  get_target_property(torch_cpu torch_cpu LOCATION)
  get_target_property(c10 c10 LOCATION)
  try_run(LOCKSTEP_GLOO_EXIT_CODE LOCKSTEP_GLOO_COMPILES
    SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/cmake/gloo_probe.cpp
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${includes}"
    COMPILE_DEFINITIONS ${TORCH_CXX_FLAGS}
    LINK_LIBRARIES ${torch_cpu} ${c10} Threads::Threads
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  set(LOCKSTEP_GLOO_PROBED "${probed}" CACHE INTERNAL "")
endfunction()

if(LOCKSTEP_WITH_GLOO)
  lockstep_probe_gloo()
  if(NOT LOCKSTEP_GLOO_COMPILES)
    message(STATUS "Gloo is off: libtorch ${Torch_VERSION} was built without "
                   "it, or its c10d headers have changed")
  elseif(NOT LOCKSTEP_GLOO_EXIT_CODE STREQUAL "0")
    message(STATUS "Gloo is off: a trial all_reduce with libtorch "
                   "${Torch_VERSION} ended with ${LOCKSTEP_GLOO_EXIT_CODE}")
  else()
    set(LOCKSTEP_HAS_GLOO ON)
    message(STATUS "Gloo works with libtorch ${Torch_VERSION}")
  endif()
else()
  message(STATUS "Gloo is off: LOCKSTEP_WITH_GLOO=OFF")
endif()
