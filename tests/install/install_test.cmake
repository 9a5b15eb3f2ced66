# See CMakeLists.txt for the variables.
set(prefix "${WORK_DIR}/prefix")
set(plugins_prefix "${WORK_DIR}/plugins-prefix")
set(plugins "${plugins_prefix}/lib/graft/plugins")
file(REMOVE_RECURSE "${WORK_DIR}")
# What stands in a user's environment is not for this test.
set(ENV{GRAFT_PLUGIN_PATH} "")
set(ENV{GRAFT_CACHE_DIR} "${WORK_DIR}/cache")

# run(command...): sets output; a failure ends the test.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect what pattern)
  if(NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "${what}: expected ${pattern} in\n${output}")
  endif()
endfunction()

# build(folder): with find_package(graft) from the prefix, and nothing else of graft.
function(build folder)
  run("${CMAKE_COMMAND}" -S "${folder}" -B "${folder}/build" -G "${GENERATOR}" -DCMAKE_BUILD_TYPE=Release
      "-DCMAKE_PREFIX_PATH=${prefix}" "-DLibTorch_ROOT=${LIBTORCH}")
  run("${CMAKE_COMMAND}" --build "${folder}/build")
endfunction()

# ---- the installation
foreach(component sdk hostapp)
  run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}" --component ${component})
endforeach()
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

run("${MAKE_TEACHER}" "${WORK_DIR}/job")
set(tiny_job --teacher "${WORK_DIR}/job/teacher" --text "${WORK_DIR}/job/text.txt" --eval-text "${WORK_DIR}/job/held_out.txt"
  --window 32 --init.tokens 512 --calibrate.tokens 768 --calibrate.steps 5 --eval.context 64 --eval.windows 4
  --agreement.prompts 2 --agreement.prompt_length 8 --agreement.tokens 5)
set(tiny_prompt --prompt "the river" --generate.tokens 4)
foreach(mixer my_mixer my_c_mixer)
  set(out "${WORK_DIR}/job/${mixer}")
  run("${prefix}/bin/hostapp" --plugin-path "${plugins}" --mixer ${mixer} --init my_initializer --objective my_objective
      ${tiny_job} --out "${out}")
  run("${prefix}/bin/hostapp" generate "${out}/student" --plugin-path "${plugins}" ${tiny_prompt})
endforeach()

# ---- the examples: mixers of third parties, with our initializer and the host as it is installed
foreach(example kda retnet)
  set(folder "${WORK_DIR}/author/${example}")
  file(COPY "${SOURCE_DIR}/examples/${example}/" DESTINATION "${folder}")
  build("${folder}")
  set(${example} "${folder}/build/plugins")
  run("${prefix}/bin/graft-validate" "${${example}}/${example}.so" --only-failed)
  expect("graft-validate on ${example}" "conforms: abi ")
  set(out "${WORK_DIR}/job/${example}")
  run("${prefix}/bin/hostapp" --plugin-path "${${example}}" --mixer ${example} --init taylor ${tiny_job} --out "${out}")
  run("${prefix}/bin/hostapp" generate "${out}/student" --plugin-path "${${example}}" ${tiny_prompt})
endforeach()
run("${CMAKE_CTEST_COMMAND}" --test-dir "${WORK_DIR}/author/kda/build" -R golden)

# Another build of a plugin takes the place of the first; nothing else has to follow.
run("${prefix}/bin/hostapp" generate "${WORK_DIR}/job/kda/student" --plugin-path "${kda}" ${tiny_prompt})
set(said "${output}")
file(SHA256 "${kda}/kda.so" first_build)
run("${CMAKE_COMMAND}" "${WORK_DIR}/author/kda/build" -DCMAKE_C_FLAGS=-g)
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/author/kda/build")
file(SHA256 "${kda}/kda.so" second_build)
if(first_build STREQUAL second_build)
  message(FATAL_ERROR "the second build of kda.so is the first one")
endif()
run("${prefix}/bin/hostapp" generate "${WORK_DIR}/job/kda/student" --plugin-path "${kda}" ${tiny_prompt})
if(NOT output STREQUAL said)
  message(FATAL_ERROR "another build of kda.so says:\n${output}\nThe first one said:\n${said}")
endif()

# Two plugins that offer one alias are told apart by id.
set(other "${WORK_DIR}/author/other_kda")
file(COPY "${SOURCE_DIR}/examples/kda/" DESTINATION "${other}")
foreach(file CMakeLists.txt plugin.c)
  file(READ "${other}/${file}" text)
  string(REPLACE "org.example.kda" "org.other.kda" text "${text}")
  file(WRITE "${other}/${file}" "${text}")
endforeach()
build("${other}")
set(two_kdas --plugin-path "${kda}" --plugin-path "${other}/build/plugins")
execute_process(COMMAND "${prefix}/bin/hostapp" ${two_kdas} --mixer kda --init taylor ${tiny_job} --out "${WORK_DIR}/job/clash"
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "an alias that two plugins offer was taken:\n${output}")
endif()
expect("an alias that two plugins offer" "ambiguous.*ask for 'org.(example|other).kda' or 'org.(example|other).kda'")
run("${prefix}/bin/hostapp" ${two_kdas} --mixer org.other.kda --init taylor ${tiny_job} --out "${WORK_DIR}/job/other_kda")
file(READ "${WORK_DIR}/job/other_kda/student/config.json" text)
if(NOT text MATCHES "org.other.kda")
  message(FATAL_ERROR "the student was not made with org.other.kda:\n${text}")
endif()

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
