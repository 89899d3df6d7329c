# Installs a build into a fresh prefix, builds examples/find_package against it, and runs the result.
# Run with: cmake -Dbuild_dir= -Dexample_dir= -Dgenerator= -Dcompiler= -Dbuild_type= -Dcxx_flags= -P install_test.cmake
set(work_dir "${build_dir}/install_test")
set(prefix "${work_dir}/prefix")
file(REMOVE_RECURSE "${work_dir}")

function(step name)
  message(STATUS "${name}: ${ARGN}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${name} ended with ${status}")
  endif()
endfunction()

step(install "${CMAKE_COMMAND}" --install "${build_dir}" --prefix "${prefix}" --config "${build_type}")
step(configure "${CMAKE_COMMAND}" -S "${example_dir}" -B "${work_dir}/build" -G "${generator}"
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_CXX_COMPILER=${compiler}" "-DCMAKE_BUILD_TYPE=${build_type}"
  "-DCMAKE_CXX_FLAGS=${cxx_flags}")
step(build "${CMAKE_COMMAND}" --build "${work_dir}/build" --config "${build_type}")
step(run "${work_dir}/build/find_package_example")
if(EXISTS "${prefix}/bin/mkernel")
  step(installed_program "${prefix}/bin/mkernel" --help)
endif()
