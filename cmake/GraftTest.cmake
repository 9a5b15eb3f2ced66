# graft_add_test(name SOURCES source... [LIBS target...] [NEEDS target...] [DEFINES macro=value...] [LABELS label...]
#   [TORCH_PCH]): one GoogleTest binary, each of its cases a ctest test named <name>.<Suite>.<Case>. NEEDS: what the
# test runs or loads. Nothing at all where tests are not built.
#
# Tests find their golden files through the macro GRAFT_TEST_DATA (tests/golden) and the build tree
# through GRAFT_BUILD_DIR.
if(GRAFT_BUILD_TESTS)
  enable_testing()
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()

function(graft_add_test name)
  if(NOT GRAFT_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "TORCH_PCH" "" "SOURCES;LIBS;NEEDS;DEFINES;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_definitions(${name} PRIVATE
    GRAFT_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/golden"
    GRAFT_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
    GRAFT_BUILD_DIR="${CMAKE_BINARY_DIR}"
    ${ARG_DEFINES})
  if(ARG_NEEDS)
    add_dependencies(${name} ${ARG_NEEDS})
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} GTest::gmock GTest::gtest_main graft_compile_options)
  if(ARG_TORCH_PCH)
    graft_use_torch_pch(${name})
  endif()
  gtest_discover_tests(${name} TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 600 LABELS "${ARG_LABELS}")
endfunction()
