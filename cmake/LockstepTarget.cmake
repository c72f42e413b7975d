# What every target of the project shares. No global flags.
add_library(lockstep_build_flags INTERFACE)
target_compile_features(lockstep_build_flags INTERFACE cxx_std_20)
target_compile_options(lockstep_build_flags INTERFACE
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-unknown-pragmas)
if(LOCKSTEP_SANITIZER)
  set(sanitizer_flags -fsanitize=${LOCKSTEP_SANITIZER} -fno-omit-frame-pointer -g1)
  if(LOCKSTEP_SANITIZER STREQUAL "undefined")
    list(APPEND sanitizer_flags -fno-sanitize-recover=undefined -fno-sanitize=vptr)
  endif()
  if(LOCKSTEP_SANITIZER STREQUAL "thread")
    # libtorch's headers have fences, which ThreadSanitizer does not know.
    list(APPEND sanitizer_flags -Wno-tsan)
  endif()
  target_compile_options(lockstep_build_flags INTERFACE ${sanitizer_flags})
  target_link_options(lockstep_build_flags INTERFACE ${sanitizer_flags})
endif()

# lockstep_target(NAME): private settings of one of our targets.
function(lockstep_target name)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:lockstep_build_flags>)
  set_target_properties(${name} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
endfunction()
