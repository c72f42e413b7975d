# Tests are compiled without optimisation, which takes half the time: what they
# test is in the library.
set(LOCKSTEP_TEST_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O0>)

# lockstep_test(TIER NAME [TIMEOUT seconds] [LIBRARIES ...] SOURCES ...)
# One executable and one ctest entry, "<tier>.<name>", labelled with the tier.
# Under a sanitizer it has four times the seconds.
# Every run leaves its counts in <build>/test-results/<tier>.<name>.json.
# The target <tier>_tests builds the tests of one tier.
function(lockstep_test tier name)
  cmake_parse_arguments(arg "NO_TORCH" "TIMEOUT" "SOURCES;LIBRARIES;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(LOCKSTEP_SANITIZER)
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
  endif()
  set(target ${tier}_${name})
  add_executable(${target} ${arg_SOURCES})
  lockstep_target(${target})
  if(NOT TARGET ${tier}_tests)
    add_custom_target(${tier}_tests)
  endif()
  add_dependencies(${tier}_tests ${target})
  target_include_directories(${target} PRIVATE
    ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  if(arg_NO_TORCH)
    target_link_libraries(${target} PRIVATE lockstep_base GTest::gtest GTest::gtest_main)
  else()
    target_link_libraries(${target} PRIVATE lockstep_test_support GTest::gtest)
    # -fPIC as in the library that made the header; programs would get -fPIE.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC ${LOCKSTEP_TEST_OPTIONS})
    target_precompile_headers(${target} REUSE_FROM lockstep_test_support)
  endif()
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES})
  add_test(NAME ${tier}.${name} COMMAND ${target}
    --gtest_output=json:${CMAKE_BINARY_DIR}/test-results/${tier}.${name}.json)
  set_tests_properties(${tier}.${name} PROPERTIES
    LABELS ${tier} TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${arg_ENVIRONMENT}")
endfunction()

# lockstep_python_test(TIER NAME FILE [TIMEOUT seconds])
# The same for a file of unittest cases. The cases find what they need in
# environment variables.
function(lockstep_python_test tier name file)
  cmake_parse_arguments(arg "" "TIMEOUT" "" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_test(NAME ${tier}.${name} COMMAND ${LOCKSTEP_PYTHON} -B
    ${PROJECT_SOURCE_DIR}/tests/support/run_python_tests.py
    ${CMAKE_CURRENT_SOURCE_DIR}/${file}
    ${CMAKE_BINARY_DIR}/test-results/${tier}.${name}.json)
  set(environment
    SOURCE_DIR=${PROJECT_SOURCE_DIR}
    BUILD_DIR=${PROJECT_BINARY_DIR}
    CMAKE=${CMAKE_COMMAND}
    CXX=${CMAKE_CXX_COMPILER}
    Torch_DIR=${Torch_DIR})
  set_tests_properties(${tier}.${name} PROPERTIES
    LABELS ${tier} TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${environment}")
endfunction()
