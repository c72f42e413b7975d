# Finds libtorch and says what it is.
# Without Torch_DIR or CMAKE_PREFIX_PATH the active Python's torch is asked.
if(NOT Torch_DIR AND NOT DEFINED ENV{Torch_DIR} AND
   NOT CMAKE_PREFIX_PATH AND NOT DEFINED ENV{CMAKE_PREFIX_PATH})
  execute_process(
    COMMAND python3 -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE python_torch OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET)
  if(python_torch)
    list(APPEND CMAKE_PREFIX_PATH ${python_torch})
  endif()
endif()
# Projects that add this one as a subdirectory link libtorch through it.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
find_package(Torch REQUIRED)
find_package(Threads REQUIRED)

set(LOCKSTEP_TESTED_TORCH 2.13.0 2.14.1)
string(REGEX MATCH "^[0-9.]+" torch_release "${Torch_VERSION}")
if(NOT torch_release IN_LIST LOCKSTEP_TESTED_TORCH)
  message(WARNING "libtorch ${Torch_VERSION} is not one of the tested "
                  "releases (${LOCKSTEP_TESTED_TORCH})")
endif()
message(STATUS "Lockstep uses libtorch ${Torch_VERSION} from ${TORCH_INSTALL_PREFIX}")
