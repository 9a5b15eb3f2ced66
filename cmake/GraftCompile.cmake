# graft_compile_options: the warnings, standard and sanitizers every target of ours is built with.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(GRAFT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(GRAFT_CCACHE_PROGRAM ccache)
  if(GRAFT_CCACHE_PROGRAM)
    # The sloppiness lets ccache serve targets that use a precompiled header.
    set(CMAKE_C_COMPILER_LAUNCHER "${GRAFT_CCACHE_PROGRAM}")
    set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime;${GRAFT_CCACHE_PROGRAM}")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()

add_library(graft_compile_options INTERFACE)
target_compile_options(graft_compile_options INTERFACE
  -Wall -Wextra -Wconversion -Wsign-conversion -Wno-unknown-pragmas
  # g++ 12 sees overlaps and overflows in operator+(const char*, std::string&&) that are not there (GCC PR 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-stringop-overflow>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds>
  $<$<BOOL:${GRAFT_WERROR}>:-Werror>)

if(GRAFT_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=address,undefined)
elseif(GRAFT_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -O1 -g1)
  add_link_options(-fsanitize=thread)
elseif(NOT GRAFT_SANITIZE STREQUAL "")
  message(FATAL_ERROR "GRAFT_SANITIZE is '${GRAFT_SANITIZE}'; it takes address, thread or nothing")
endif()

# graft_quick_build(target): of the host's own code most prepares what LibTorch and the plugins then compute, JSON and
# options above all. Optimising that to the full takes a third more of the build and gives nothing back.
function(graft_quick_build target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# graft_unity_build(target): with GRAFT_UNITY, a few of its files are compiled as one. A file that uses LibTorch
# spends most of its time on what all of them instantiate.
function(graft_unity_build target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${GRAFT_UNITY} UNITY_BUILD_BATCH_SIZE 5)
  if(GRAFT_UNITY)
    # Said of what is no longer in a file of its own.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# graft_add_library(name [HOT] source...): a static library of the host; HOT = it goes through data itself.
function(graft_add_library name)
  cmake_parse_arguments(ARG "HOT" "" "" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE graft_compile_options)
  graft_unity_build(${name})
  if(NOT ARG_HOT)
    graft_quick_build(${name})
  endif()
endfunction()

# The host's files include these nearly all, most by way of another.
set(graft_common_headers <algorithm> <filesystem> <fstream> <functional> <map> <memory> <optional> <set> <span>
  <sstream> <string> <variant> <vector> <nlohmann/json.hpp>)

# _graft_use_pch(target pch library header...): `pch` is made on first use. Once per flag set is enough.
function(_graft_use_pch target pch library)
  if(NOT TARGET ${pch})
    file(WRITE "${CMAKE_BINARY_DIR}/${pch}.cpp" "")
    add_library(${pch} STATIC "${CMAKE_BINARY_DIR}/${pch}.cpp")
    target_link_libraries(${pch} PUBLIC ${library} PRIVATE graft_compile_options)
    target_precompile_headers(${pch} PRIVATE ${ARGN})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${pch})
  # Executables would be built with -fPIE, and GCC takes no precompiled header of other flags.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fPIC>)
endfunction()

# graft_use_host_pch(target): for what needs no LibTorch.
function(graft_use_host_pch target)
  _graft_use_pch(${target} graft_host_pch nlohmann_json::nlohmann_json ${graft_common_headers})
endfunction()

# graft_use_torch_pch(target): LibTorch's headers take half a minute to parse. Tensors alone: with all of
# torch/torch.h in it, each file that uses it would take a quarter of a minute more.
function(graft_use_torch_pch target)
  _graft_use_pch(${target} graft_torch_pch LibTorch::torch ${graft_common_headers}
    <ATen/ATen.h> <ATen/Parallel.h> <ATen/core/grad_mode.h> <c10/core/InferenceMode.h>)
endfunction()
