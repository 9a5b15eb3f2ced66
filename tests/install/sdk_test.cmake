# An author's way, from an installation into an empty prefix.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake")
set(plugins_prefix "${WORK_DIR}/plugins-prefix")
set(plugins "${plugins_prefix}/lib/graft/plugins")

# ---- the installation
install_graft(sdk hostapp)
foreach(file
    bin/graft-validate bin/hostapp lib/libgraft_conformance.a
    include/graft/graft.h include/graft/plugin.hpp include/graft/dlpack/dlpack.h include/graft/version.h
    include/graft/conformance/conformance.hpp include/graft/conformance/conformance_gtest.hpp
    lib/cmake/graft/graftConfig.cmake lib/cmake/graft/GraftPlugin.cmake lib/cmake/graft/FindLibTorch.cmake
    share/graft/recipes/gdn-taylor.toml share/graft/templates/mixer_c/my_c_mixer.c)
  if(NOT EXISTS "${prefix}/${file}")
    message(FATAL_ERROR "the installation has no ${file}")
  endif()
endforeach()

# Nothing that is read at an author's build may lead back to the source or build tree.
file(GLOB_RECURSE installed "${prefix}/include/*" "${prefix}/lib/cmake/*" "${prefix}/share/*")
foreach(file IN LISTS installed)
  file(READ "${file}" text)
  foreach(tree "${SOURCE_DIR}" "${BUILD_DIR}")
    string(FIND "${text}" "${tree}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${tree}")
    endif()
  endforeach()
endforeach()

# ---- each template, from find_package to a plugin that conforms
file(GLOB templates RELATIVE "${prefix}/share/graft/templates" "${prefix}/share/graft/templates/*")
foreach(template IN LISTS templates)
  set(folder "${WORK_DIR}/author/${template}")
  file(COPY "${prefix}/share/graft/templates/${template}/" DESTINATION "${folder}")
  string(TIMESTAMP start "%s")
  build("${folder}")
  file(GLOB plugin "${folder}/build/plugins/*.so")
  run("${prefix}/bin/graft-validate" "${plugin}" --only-failed)
  expect("graft-validate on ${template}" "conforms: abi ")
  string(TIMESTAMP end "%s")
  math(EXPR seconds "${end} - ${start}")
  string(REGEX MATCH "conforms: [^\n]*" verdict "${output}")
  message(STATUS "${template}: ${seconds} s from find_package to validated; ${verdict}")
  # Strips on the way: the sidecar's hash has to follow.
  run("${CMAKE_COMMAND}" --install "${folder}/build" --prefix "${plugins_prefix}" --strip)
endforeach()

# ---- the installed host
run("${prefix}/bin/hostapp" plugins list --plugin-path "${plugins}")
foreach(alias my_mixer my_c_mixer my_initializer my_objective)
  expect("hostapp plugins list" " ${alias} [^\n]*${plugins}/${alias}.so\n")
endforeach()
if(output MATCHES "refused")
  message(FATAL_ERROR "hostapp plugins list:\n${output}")
endif()
file(READ "${plugins}/my_mixer.graftplugin.toml" sidecar)
if(NOT sidecar MATCHES "build_tags = \"compiler=[a-z]+-[0-9]+;cxx11abi=1;libtorch=[0-9.]+\"")
  message(FATAL_ERROR "the sidecar of a LibTorch plugin lacks its build tags:\n${sidecar}")
endif()

make_job()
foreach(mixer my_mixer my_c_mixer)
  set(out "${WORK_DIR}/job/${mixer}")
  run("${prefix}/bin/hostapp" --plugin-path "${plugins}" --mixer ${mixer} --init my_initializer --objective my_objective
      ${tiny_job} --out "${out}")
  run("${prefix}/bin/hostapp" generate "${out}/student" --plugin-path "${plugins}" ${tiny_prompt})
endforeach()

# ---- a plugin made by `plugins new`, in a project without C++
set(made "${WORK_DIR}/author/deep_gate")
run("${prefix}/bin/hostapp" plugins new mixer-c deep_gate "${made}" --id-prefix org.graft-test)
expect("hostapp plugins new" "hostapp plugins validate ${made}/build/plugins/deep_gate.so")
build("${made}")
run("${prefix}/bin/hostapp" plugins validate "${made}/build/plugins/deep_gate.so" --include "^forward" --only-failed)
expect("hostapp plugins validate" "conforms: abi ")

# ---- the kit as a library
file(COPY "${SOURCE_DIR}/tests/install/kit_user" DESTINATION "${WORK_DIR}/author")
build("${WORK_DIR}/author/kit_user")
run("${WORK_DIR}/author/kit_user/build/kit_user" "${made}/build/plugins/deep_gate.so")
expect("kit_user" "pass forward.sizes")
