# FindLibTorch: LibTorch as CMake targets, without the CUDA Toolkit that TorchConfig.cmake asks for.
#
#   find_package(LibTorch REQUIRED)     ->  LibTorch::torch  (libtorch_cpu + libc10, headers as SYSTEM)
#   LibTorch_VERSION, LibTorch_ROOT_DIR, LibTorch_LIBRARY_DIR; LibTorch_REASON when not found
#
# Searched in this order; the first folder that holds a LibTorch is taken, and refused if too old:
#   1. -DLibTorch_ROOT / environment LibTorch_ROOT, then environment GRAFT_LIBTORCH
#   2. each entry of CMAKE_PREFIX_PATH (variable, then environment): the unpacked LibTorch archive, a
#      Python site-packages or virtual environment that has torch, or torch.utils.cmake_prefix_path
#   3. .deps/libtorch beside this project, which scripts/setup.sh makes
#
# libtorch.so itself is not linked: in a CUDA build it pulls in every CUDA library, and graft loads
# those only where there is a GPU.

set(_lt_min_version 2.8)
if(LibTorch_FIND_VERSION AND LibTorch_FIND_VERSION VERSION_GREATER _lt_min_version)
  set(_lt_min_version ${LibTorch_FIND_VERSION})
endif()

# Sets `out` to the folder under `prefix` that has include/torch and lib/libtorch_cpu.so, or "".
function(_libtorch_locate prefix out)
  file(GLOB site_packages "${prefix}/lib/python3.*/site-packages/torch")
  # torch.utils.cmake_prefix_path is <torch>/share/cmake.
  foreach(candidate IN ITEMS "${prefix}" "${prefix}/torch" "${prefix}/libtorch" ${site_packages}
                             "${prefix}/../..")
    if(EXISTS "${candidate}/lib/libtorch_cpu.so" AND EXISTS "${candidate}/lib/libc10.so"
       AND EXISTS "${candidate}/include/torch/csrc/api/include/torch/version.h")
      get_filename_component(candidate "${candidate}" REALPATH)
      set(${out} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

# Sets `out` to "major.minor.patch" read from the headers under `root`, or "" if they do not say.
function(_libtorch_read_version root out)
  # Since 2.9 torch/version.h only includes torch/headeronly/version.h.
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${root}/include/${header}")
      file(STRINGS "${root}/include/${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      if(lines MATCHES "MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+)")
        set(${out} "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

get_filename_component(_lt_deps "${CMAKE_CURRENT_LIST_DIR}/../.deps/libtorch" ABSOLUTE)
set(_lt_way_out "run scripts/setup.sh, or name yours with -DCMAKE_PREFIX_PATH=/path/to/libtorch")
set(_lt_root "")
set(_lt_usable FALSE)
set(_lt_reason "")
foreach(_lt_prefix IN ITEMS "${LibTorch_ROOT}" "$ENV{LibTorch_ROOT}" "$ENV{GRAFT_LIBTORCH}")
  if(_lt_prefix AND NOT _lt_root AND NOT _lt_reason)
    _libtorch_locate("${_lt_prefix}" _lt_root)
    if(NOT _lt_root)
      # Meant for LibTorch alone, so to look further would hide a slip of the pen.
      set(_lt_reason "LibTorch_ROOT or GRAFT_LIBTORCH is ${_lt_prefix}, which holds no lib/libtorch_cpu.so with headers: correct or unset it")
    endif()
  endif()
endforeach()
if(NOT _lt_reason)
  string(REPLACE ":" ";" _lt_env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_lt_prefix IN LISTS CMAKE_PREFIX_PATH _lt_env_prefixes _lt_deps)
    if(NOT _lt_root)
      _libtorch_locate("${_lt_prefix}" _lt_root)
    endif()
  endforeach()
endif()

set(LibTorch_ROOT_DIR "${_lt_root}")
set(LibTorch_LIBRARY_DIR "")
set(LibTorch_VERSION "")
if(_lt_root)
  set(LibTorch_LIBRARY_DIR "${_lt_root}/lib")
  _libtorch_read_version("${_lt_root}" LibTorch_VERSION)
  if(NOT LibTorch_VERSION)
    set(_lt_reason "${_lt_root}/include has no readable torch/version.h: ${_lt_way_out}")
  elseif(LibTorch_VERSION VERSION_LESS _lt_min_version)
    set(_lt_reason "the LibTorch in ${_lt_root} is ${LibTorch_VERSION}, but ${_lt_min_version} or newer is needed: ${_lt_way_out}")
  else()
    set(_lt_usable TRUE)
  endif()
elseif(NOT _lt_reason)
  set(_lt_reason "no LibTorch in CMAKE_PREFIX_PATH or ${_lt_deps}: ${_lt_way_out}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT_DIR _lt_usable
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${_lt_reason}")
set(LibTorch_REASON "${_lt_reason}")

# A script (cmake -P) may ask where LibTorch is, but has no targets.
if(LibTorch_FOUND AND NOT CMAKE_SCRIPT_MODE_FILE AND NOT TARGET LibTorch::torch)
  foreach(_lt_lib IN ITEMS c10 torch_cpu)
    add_library(LibTorch::${_lt_lib} SHARED IMPORTED)
    set_target_properties(LibTorch::${_lt_lib} PROPERTIES
      IMPORTED_LOCATION "${LibTorch_LIBRARY_DIR}/lib${_lt_lib}.so"
      IMPORTED_SONAME "lib${_lt_lib}.so")
  endforeach()
  add_library(LibTorch::torch INTERFACE IMPORTED)
  set_target_properties(LibTorch::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${LibTorch_ROOT_DIR}/include;${LibTorch_ROOT_DIR}/include/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES "LibTorch::torch_cpu;LibTorch::c10")
  # Without OpenMP the inline at::parallel_for runs on one thread and says nothing. Clang would bring
  # a second OpenMP runtime beside the libgomp that LibTorch uses, so there it stays off.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set_target_properties(LibTorch::torch PROPERTIES
      INTERFACE_COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CXX>:-fopenmp>"
      INTERFACE_LINK_OPTIONS "-fopenmp")
  endif()
endif()
