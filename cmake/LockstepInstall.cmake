include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)

# CMake's INSTALL_RPATH_USE_LINK_PATH leaves out a libtorch in the source tree.
set_target_properties(lockstep PROPERTIES
  INSTALL_RPATH "$ORIGIN;${TORCH_INSTALL_PREFIX}/lib")
install(TARGETS lockstep EXPORT LockstepTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET lockstep_mpi)
  set_target_properties(lockstep_mpi PROPERTIES
    INSTALL_RPATH "${TORCH_INSTALL_PREFIX}/lib")
  install(TARGETS lockstep_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION ${package_dir})
configure_package_config_file(
  cmake/LockstepConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/LockstepConfigVersion.cmake
  DESTINATION ${package_dir})
