# Compiler flags, and the functions that give them to a target.
include(CheckCXXCompilerFlag)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

get_property(multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT multi_config AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

find_program(MKERNEL_CCACHE ccache)
mark_as_advanced(MKERNEL_CCACHE)
if(MKERNEL_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${MKERNEL_CCACHE}")
endif()

check_cxx_compiler_flag(-march=native MKERNEL_HAS_MARCH_NATIVE)

if(MKERNEL_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "MKERNEL_FUZZ=ON needs clang, the compiler is ${CMAKE_CXX_COMPILER_ID}: use --preset fuzz")
  endif()
  if(MKERNEL_SANITIZE)
    message(FATAL_ERROR "MKERNEL_FUZZ=ON brings its own sanitizers: leave MKERNEL_SANITIZE empty")
  endif()
  set(mkernel_sanitizer_flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
elseif(MKERNEL_SANITIZE)
  set(mkernel_sanitizer_flags -fsanitize=${MKERNEL_SANITIZE} -fno-sanitize-recover=all)
endif()
if(mkernel_sanitizer_flags)
  list(APPEND mkernel_sanitizer_flags -fno-omit-frame-pointer)
endif()

set(mkernel_warnings -Wall -Wextra -Wpedantic -Wshadow)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # False alarms on std::string (GCC bug 105651).
  list(APPEND mkernel_warnings -Wno-restrict)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND MKERNEL_SANITIZE)
  # The checks that a sanitizer adds hide from GCC what is initialised; the plain build has this warning.
  list(APPEND mkernel_warnings -Wno-maybe-uninitialized)
endif()

# Warnings and sanitizers.
function(mkernel_flags target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE ${mkernel_warnings} ${mkernel_sanitizer_flags})
  target_link_options(${target} PRIVATE ${mkernel_sanitizer_flags})
  if(MKERNEL_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

# What is shipped names its sources relative to the source tree, in what assertions print.
function(mkernel_relative_paths target)
  target_compile_options(${target} PRIVATE "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")
endfunction()

# No fused multiply-add behind our back: the host executor and the simulator must agree to the bit.
function(mkernel_exact_floats target)
  target_compile_options(${target} PRIVATE -ffp-contract=off)
endfunction()
