# The CUDA part: all src/**/*.cu, built when nvcc and CUTLASS' headers are found (MKERNEL_CUDA=AUTO), always (ON) or
# never (OFF).
set(MKERNEL_CUTLASS_INCLUDE "${PROJECT_SOURCE_DIR}/.deps/cutlass/include" CACHE PATH
  "Headers of CUTLASS; scripts/get_cutlass.sh fetches them")
if(NOT MKERNEL_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MKERNEL_CUDA is '${MKERNEL_CUDA}', it must be AUTO, ON or OFF")
endif()
if(MKERNEL_CUDA STREQUAL "OFF")
  return()
endif()

set(mkernel_cuda_arch 90a)  # Hopper with its own features: TMA, wgmma

# Sets `out` to why this nvcc is of no use, or to nothing. An nvcc may be too old for the architecture, for C++20 or for
# the fences that we use, or refuse the host compiler; CMake would take each as fatal, and the CPU part needs none of it.
function(mkernel_probe_nvcc nvcc out)
  set(source "${PROJECT_BINARY_DIR}/nvcc_probe/probe.cu")
  file(WRITE "${source}" "#include <concepts>\ntemplate <std::integral T>\n__global__ void f(T* x) { asm volatile(\"fence.acquire.sys;\"); *x = 1; }\n\
template __global__ void f<int>(int*);\n")
  set(host_compiler "${CMAKE_CUDA_HOST_COMPILER}")
  if(NOT host_compiler)
    set(host_compiler "$ENV{CUDAHOSTCXX}")
  endif()
  if(host_compiler)
    set(host_compiler "-ccbin=${host_compiler}")
  endif()
  execute_process(
    COMMAND "${nvcc}" ${host_compiler} -std=c++20 -arch=sm_${mkernel_cuda_arch} -c "${source}" -o "${source}.o"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    set(${out} "" PARENT_SCOPE)
  else()
    string(REGEX REPLACE "\n.*" "" first_line "${output}")
    set(${out} "${nvcc} cannot build for sm_${mkernel_cuda_arch} in C++20 with PTX 8.6: ${status} ${first_line}" PARENT_SCOPE)
  endif()
endfunction()

if(NOT CMAKE_CUDA_COMPILER)
  if(DEFINED ENV{CUDACXX})
    set(mkernel_nvcc "$ENV{CUDACXX}")
  else()
    # Finds nvcc also where the toolkit is installed but not in PATH.
    find_package(CUDAToolkit QUIET)
    set(mkernel_nvcc "${CUDAToolkit_NVCC_EXECUTABLE}")
  endif()
  if(mkernel_nvcc)
    mkernel_probe_nvcc("${mkernel_nvcc}" mkernel_cuda_obstacle)
  else()
    set(mkernel_cuda_obstacle "no nvcc found in PATH, in CUDACXX or in the usual places")
  endif()
  if(NOT mkernel_cuda_obstacle AND NOT EXISTS "${MKERNEL_CUTLASS_INCLUDE}/cute/tensor.hpp")
    set(mkernel_cuda_obstacle "CUTLASS' headers are not in ${MKERNEL_CUTLASS_INCLUDE}: run scripts/get_cutlass.sh")
  endif()
  if(mkernel_cuda_obstacle AND MKERNEL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MKERNEL_CUDA=ON, but ${mkernel_cuda_obstacle}")
  elseif(mkernel_cuda_obstacle)
    message(STATUS "CUDA: the CUDA part is left out: ${mkernel_cuda_obstacle}")
    return()
  endif()
  set(CMAKE_CUDA_COMPILER "${mkernel_nvcc}")
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${mkernel_cuda_arch})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
file(GLOB_RECURSE mkernel_cuda_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/src/*.cu" "${PROJECT_SOURCE_DIR}/tests/*.cu")
message(STATUS "CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architecture ${mkernel_cuda_arch}")

# CMake 3.25 does not know that nvcc speaks C++20.
foreach(kind STANDARD EXTENSION)
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()

function(mkernel_cuda_target target)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20
    CUDA_STANDARD_REQUIRED ON
    CUDA_ARCHITECTURES ${mkernel_cuda_arch}
    POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
  target_include_directories(${target} SYSTEM PRIVATE "${MKERNEL_CUTLASS_INCLUDE}")
  target_compile_definitions(${target} PRIVATE MKERNEL_HAS_CUDA)
  # Relaxed: the plans are constexpr functions that host and device share, lambdas among them.
  target_compile_options(${target} PRIVATE --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra)
  if(MKERNEL_WERROR)
    target_compile_options(${target} PRIVATE -Werror=all-warnings)
  endif()
endfunction()

# x_test.cu is a program of its own; without a GPU it says so and exits with 77, which CTest shows as skipped.
set(mkernel_cuda_tests ${mkernel_cuda_sources})
list(FILTER mkernel_cuda_tests INCLUDE REGEX "_test\\.cu$")
list(FILTER mkernel_cuda_sources EXCLUDE REGEX "_test\\.cu$")
add_library(mkernel_cuda OBJECT ${mkernel_cuda_sources})
mkernel_cuda_target(mkernel_cuda)
target_link_libraries(mkernel_cuda PRIVATE fmt::fmt)
target_sources(mkernel PRIVATE $<TARGET_OBJECTS:mkernel_cuda>)
target_compile_definitions(mkernel PRIVATE MKERNEL_HAS_CUDA)
target_link_libraries(mkernel PRIVATE CUDA::cudart_static)
set(MKERNEL_CUDA_DEPENDENCY "find_dependency(CUDAToolkit)")  # for users of the installed library
if(TARGET mkernel_cli_lib)
  target_compile_definitions(mkernel_cli_lib PRIVATE MKERNEL_HAS_CUDA)
endif()
if(MKERNEL_TESTS)
  foreach(source IN LISTS mkernel_cuda_tests)
    get_filename_component(name "${source}" NAME_WE)
    add_executable(${name} "${source}")
    mkernel_cuda_target(${name})
    target_link_libraries(${name} PRIVATE mkernel fmt::fmt)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
  endforeach()
endif()

# For bench/attention/attention_core.py. Not built unless asked for.
add_library(mkernel_attention SHARED EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/bench/attention/shim.cc")
target_include_directories(mkernel_attention PRIVATE "${PROJECT_SOURCE_DIR}/include")
target_link_libraries(mkernel_attention PRIVATE mkernel fmt::fmt)
