# GRAFT_HAS_CUDA: whether the CUDA kernels are built. GRAFT_CUDA=AUTO builds them where nvcc is found and no sanitizer is
# asked for (which would see host code alone), ON wants them, OFF does without; nothing else in the build depends on it.
set(GRAFT_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE GRAFT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(GRAFT_HAS_CUDA OFF)
if(NOT GRAFT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GRAFT_CUDA is '${GRAFT_CUDA}'; it takes AUTO, ON or OFF")
endif()
if(GRAFT_CUDA STREQUAL "OFF" OR (GRAFT_CUDA STREQUAL "AUTO" AND GRAFT_SANITIZE))
  return()
endif()

# Machine code for each generation, and PTX of the last, from which drivers make code for those to come.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
endif()
include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  find_package(CUDAToolkit)
endif()
if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND)
  set(GRAFT_HAS_CUDA ON)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
elseif(GRAFT_CUDA STREQUAL "ON")
  message(FATAL_ERROR "GRAFT_CUDA=ON, but there is no nvcc with its toolkit: put nvcc on PATH, set CMAKE_CUDA_COMPILER, "
    "or configure with -DGRAFT_CUDA=OFF")
endif()

# graft_add_cuda_library(name SOURCES source.cu...): a static library of kernels and their launchers.
function(graft_add_cuda_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_compile_options(${name} PRIVATE "SHELL:-Xcompiler -Wall,-Wextra"
    $<$<BOOL:${GRAFT_WERROR}>:SHELL:-Werror all-warnings>)
  target_link_libraries(${name} PUBLIC CUDA::cudart_static)
  set_target_properties(${name} PROPERTIES CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN TRUE)
endfunction()
