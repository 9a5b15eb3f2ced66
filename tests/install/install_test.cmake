# See CMakeLists.txt for the variables.
set(prefix "${WORK_DIR}/prefix")
set(plugins_prefix "${WORK_DIR}/plugins-prefix")
file(REMOVE_RECURSE "${WORK_DIR}")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}" --component sdk)

foreach(file
    include/graft/graft.h include/graft/plugin.hpp include/graft/dlpack/dlpack.h include/graft/version.h
    lib/cmake/graft/graftConfig.cmake lib/cmake/graft/GraftPlugin.cmake lib/cmake/graft/FindLibTorch.cmake
    share/graft/templates/identity_c/identity.c share/graft/templates/leaky_cpp/leaky.cpp)
  if(NOT EXISTS "${prefix}/${file}")
    message(FATAL_ERROR "the installation has no ${file}")
  endif()
endforeach()

# Nothing installed may lead back to the source or build tree.
file(GLOB_RECURSE installed "${prefix}/*")
foreach(file IN LISTS installed)
  file(READ "${file}" text)
  foreach(tree "${SOURCE_DIR}" "${BUILD_DIR}")
    string(FIND "${text}" "${tree}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${tree}")
    endif()
  endforeach()
endforeach()

# A plugin that links LibTorch finds it through the package too. It has the C++ template's source.
file(WRITE "${WORK_DIR}/torch/CMakeLists.txt" "
cmake_minimum_required(VERSION 3.25)
project(leaky_torch LANGUAGES CXX)
find_package(graft 0.1 REQUIRED)
graft_add_plugin(leaky_torch TORCH
  SOURCES \"${prefix}/share/graft/templates/leaky_cpp/leaky.cpp\"
  ID org.example.leaky-pack LICENSE Apache-2.0 ALIASES leaky)
")

foreach(project "${prefix}/share/graft/templates/identity_c" "${prefix}/share/graft/templates/leaky_cpp"
                "${WORK_DIR}/torch")
  cmake_path(GET project FILENAME name)
  set(build "${WORK_DIR}/build-${name}")
  set(into "${plugins_prefix}")
  if(name STREQUAL torch)
    set(into "${WORK_DIR}/torch-prefix")
  endif()
  run("${CMAKE_COMMAND}" -S "${project}" -B "${build}" -G "${GENERATOR}" -DCMAKE_BUILD_TYPE=Release
      "-DCMAKE_PREFIX_PATH=${prefix}" "-DLibTorch_ROOT=${LIBTORCH}")
  run("${CMAKE_COMMAND}" --build "${build}")
  # Strips on the way: the sidecar's hash has to follow.
  run("${CMAKE_COMMAND}" --install "${build}" --prefix "${into}" --strip)
endforeach()

run("${HOST}" "${plugins_prefix}/lib/graft/plugins" identity leaky)
if(NOT output MATCHES "identity: 21\nleaky: [0-9.]+\n")
  message(FATAL_ERROR "the installed plugins gave:\n${output}")
endif()
file(READ "${WORK_DIR}/torch-prefix/lib/graft/plugins/leaky_torch.graftplugin.toml" sidecar)
if(NOT sidecar MATCHES "build_tags = \"compiler=[a-z]+-[0-9]+;cxx11abi=1;libtorch=[0-9.]+\"")
  message(FATAL_ERROR "the sidecar of a LibTorch plugin lacks its build tags:\n${sidecar}")
endif()
run("${HOST}" "${WORK_DIR}/torch-prefix/lib/graft/plugins" leaky)
