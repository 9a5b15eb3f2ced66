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
  # g++ 12 sees overlaps in operator+(const char*, std::string&&) that are not there (GCC PR 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
  $<$<BOOL:${GRAFT_WERROR}>:-Werror>)

if(GRAFT_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=address,undefined)
elseif(GRAFT_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=thread)
elseif(NOT GRAFT_SANITIZE STREQUAL "")
  message(FATAL_ERROR "GRAFT_SANITIZE is '${GRAFT_SANITIZE}'; it takes address, thread or nothing")
endif()

# graft_add_library(name source...): a static library of the host.
function(graft_add_library name)
  add_library(${name} STATIC ${ARGN})
  target_include_directories(${name} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE graft_compile_options)
endfunction()

# graft_use_torch_pch(target): LibTorch's headers take half a minute to parse; once per flag set is enough.
function(graft_use_torch_pch target)
  if(NOT TARGET graft_torch_pch)
    file(WRITE "${CMAKE_BINARY_DIR}/torch_pch.cpp" "")
    add_library(graft_torch_pch STATIC "${CMAKE_BINARY_DIR}/torch_pch.cpp")
    target_link_libraries(graft_torch_pch PUBLIC LibTorch::torch PRIVATE graft_compile_options)
    target_precompile_headers(graft_torch_pch PRIVATE <torch/torch.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM graft_torch_pch)
  # Executables would be built with -fPIE, and GCC takes no precompiled header of other flags.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fPIC>)
endfunction()
