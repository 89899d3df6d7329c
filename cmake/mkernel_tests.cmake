# Tests, fuzz targets and benchmarks, all found by the names of their files.

# Folders whose files may use the program's sources, and may run the program itself.
function(mkernel_link_cli target source)
  file(RELATIVE_PATH path "${PROJECT_SOURCE_DIR}" "${source}")
  if(path MATCHES "^src/")
    return()
  endif()
  if(TARGET mkernel_cli_lib)
    target_link_libraries(${target} PRIVATE mkernel_cli_lib)
  endif()
  if(TARGET mkernel_cli)
    target_compile_definitions(${target} PRIVATE MKERNEL_CLI_EXE="$<TARGET_FILE:mkernel_cli>")
    add_dependencies(${target} mkernel_cli)
  endif()
endfunction()

# What every test, fuzz target and benchmark shares.
function(mkernel_test_program target source)
  mkernel_flags(${target})
  mkernel_exact_floats(${target})
  target_compile_definitions(${target} PRIVATE MKERNEL_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(${target} PRIVATE mkernel fmt::fmt nlohmann_json::nlohmann_json)
  mkernel_link_cli(${target} "${source}")
  if(mkernel_verbs)
    target_compile_definitions(${target} PRIVATE MKERNEL_HAS_VERBS)
  endif()
endfunction()

# An RDMA device inside the process, for tests and fuzz targets.
function(mkernel_add_fakes)
  if(mkernel_verbs)
    add_library(mkernel_fakes STATIC "${PROJECT_SOURCE_DIR}/src/net/verbs/fake_verbs.cc")
    mkernel_test_program(mkernel_fakes "${PROJECT_SOURCE_DIR}/src/net/verbs/fake_verbs.cc")
  endif()
endfunction()

# src/net/local/x_test.cc belongs to net_local_test, cli/x_test.cc to cli_test, tests/x_test.cc to tests_test.
function(mkernel_test_name folder out)
  file(RELATIVE_PATH path "${PROJECT_SOURCE_DIR}" "${folder}")
  string(REGEX REPLACE "^src/" "" path "${path}")
  string(MAKE_C_IDENTIFIER "${path}" path)
  set(${out} "${path}_test" PARENT_SCOPE)
endfunction()

function(mkernel_add_tests)
  find_package(GTest REQUIRED)
  include(GoogleTest)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/src/*_test.cc" "${PROJECT_SOURCE_DIR}/cli/*_test.cc" "${PROJECT_SOURCE_DIR}/tests/*_test.cc")
  if(NOT mkernel_verbs)
    # These include libibverbs' own header.
    list(FILTER sources EXCLUDE REGEX "/verbs/verbs_[a-z]+_test\\.cc$")
  endif()
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    mkernel_test_name("${folder}" name)
    if(NOT TARGET ${name})
      add_executable(${name})
      mkernel_test_program(${name} "${source}")
      target_link_libraries(${name} PRIVATE GTest::gtest_main)
      if(TARGET mkernel_fakes)
        target_link_libraries(${name} PRIVATE mkernel_fakes)
      endif()
      gtest_discover_tests(${name} TEST_PREFIX "${name}." NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
        TEST_FILTER "-*Timing*" PROPERTIES TIMEOUT 600)
      # Tests that measure time have "Timing" in their name: they run alone, and mean nothing under a sanitizer.
      if(NOT mkernel_sanitizer_flags)
        gtest_discover_tests(${name} TEST_PREFIX "${name}." NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
          TEST_FILTER "*Timing*" PROPERTIES TIMEOUT 600 RUN_SERIAL TRUE)
      endif()
    endif()
    target_sources(${name} PRIVATE "${source}")
  endforeach()

  # A rank that ends itself at a point of the protocol: its own functions stand before these of the library.
  add_executable(kill_worker "${PROJECT_SOURCE_DIR}/tests/cli/kill_worker.cc")
  mkernel_test_program(kill_worker "${PROJECT_SOURCE_DIR}/tests/cli/kill_worker.cc")
  foreach(symbol
      _ZN7mkernel22create_fabric_endpointEiiRKNS_13FabricOptionsE
      _ZN7mkernel21create_verbs_endpointEiiRKNS_12VerbsOptionsE
      _ZN7mkernel11HostNetwork4pushEiiRKNS_6RecordE
      _ZN7mkernel9Bootstrap6createERKNS_16BootstrapOptionsE
      _ZN7mkernel9Bootstrap8exchangeERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES8_d)
    target_link_options(kill_worker PRIVATE "-Wl,--wrap=${symbol}")
  endforeach()
  target_compile_definitions(tests_cli_test PRIVATE MKERNEL_KILL_WORKER="$<TARGET_FILE:kill_worker>")
  add_dependencies(tests_cli_test kill_worker)

  # The protocols, as models that spin explores completely; broken variants of them must fail.
  add_test(NAME protocol_models COMMAND "${PROJECT_SOURCE_DIR}/tests/models/run.sh")
  set_tests_properties(protocol_models PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 600)

  # docs/performance.md is what the script makes of bench/results/.
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_Interpreter_FOUND)
    add_test(NAME performance_table_is_current
      COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/scripts/performance_table.py" --check)
  endif()

  # The installed package is used from outside, by a project of its own.
  list(JOIN mkernel_sanitizer_flags " " sanitizer_flags)
  add_test(NAME install_and_find_package COMMAND "${CMAKE_COMMAND}"
    "-Dbuild_dir=${PROJECT_BINARY_DIR}"
    "-Dexample_dir=${PROJECT_SOURCE_DIR}/examples/find_package"
    "-Dgenerator=${CMAKE_GENERATOR}"
    "-Dcompiler=${CMAKE_CXX_COMPILER}"
    "-Dbuild_type=$<CONFIG>"
    "-Dcxx_flags=${sanitizer_flags}"
    -P "${PROJECT_SOURCE_DIR}/cmake/install_test.cmake")
  set_tests_properties(install_and_find_package PROPERTIES TIMEOUT 600)
endfunction()

# With libFuzzer: programs that look for new inputs. Without: programs that replay the kept ones, as tests.
function(mkernel_add_fuzz_targets)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/src/*_fuzz.cc" "${PROJECT_SOURCE_DIR}/cli/*_fuzz.cc" "${PROJECT_SOURCE_DIR}/tests/*_fuzz.cc")
  if(NOT mkernel_verbs)
    list(FILTER sources EXCLUDE REGEX "/verbs/address_fuzz\\.cc$")
  endif()
  # Globbed only so that a new corpus folder makes CMake look again.
  file(GLOB corpora CONFIGURE_DEPENDS LIST_DIRECTORIES true "${PROJECT_SOURCE_DIR}/tests/corpus/*")
  foreach(source IN LISTS sources)
    get_filename_component(target "${source}" NAME_WE)
    string(REGEX REPLACE "_fuzz$" "" name "${target}")
    set(corpus "${PROJECT_SOURCE_DIR}/tests/corpus/${name}")
    add_executable(${target} "${source}")
    mkernel_test_program(${target} "${source}")
    if(TARGET mkernel_fakes)
      target_link_libraries(${target} PRIVATE mkernel_fakes)
    endif()
    if(MKERNEL_FUZZ)
      target_link_options(${target} PRIVATE -fsanitize=fuzzer)
      set_property(GLOBAL APPEND PROPERTY mkernel_fuzz_targets ${target})
      continue()
    endif()
    target_sources(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/fuzz_replay_main.cc")
    if(corpus IN_LIST corpora)
      add_test(NAME ${target}.corpus COMMAND ${target} "${corpus}")
      set_tests_properties(${target}.corpus PROPERTIES TIMEOUT 600)
    else()
      message(STATUS "Fuzz target ${target}: no tests/corpus/${name}, nothing to replay")
    endif()
  endforeach()
  if(MKERNEL_FUZZ)
    # `make fuzz` reads this list.
    get_property(targets GLOBAL PROPERTY mkernel_fuzz_targets)
    list(JOIN targets "\n" lines)
    file(WRITE "${PROJECT_BINARY_DIR}/fuzz_targets.txt" "${lines}\n")
  endif()
endfunction()

function(mkernel_add_benchmarks)
  find_package(benchmark REQUIRED)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS
    "${PROJECT_SOURCE_DIR}/src/*_bench.cc" "${PROJECT_SOURCE_DIR}/cli/*_bench.cc"
    "${PROJECT_SOURCE_DIR}/bench/*_bench.cc")
  foreach(source IN LISTS sources)
    get_filename_component(target "${source}" NAME_WE)
    add_executable(${target} "${source}")
    mkernel_test_program(${target} "${source}")
    target_link_libraries(${target} PRIVATE benchmark::benchmark_main)
  endforeach()
endfunction()

if(MKERNEL_TESTS OR MKERNEL_FUZZ)
  mkernel_add_fakes()
endif()
if(MKERNEL_TESTS)
  enable_testing()
  mkernel_add_tests()
endif()
if(MKERNEL_TESTS OR MKERNEL_FUZZ)
  mkernel_add_fuzz_targets()
endif()
if(MKERNEL_BENCH)
  mkernel_add_benchmarks()
endif()
