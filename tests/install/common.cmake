# What the tests of an installation share; see CMakeLists.txt for the variables.
set(prefix "${WORK_DIR}/prefix")
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

# install_graft(component...): into the prefix.
function(install_graft)
  foreach(component IN LISTS ARGN)
    run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}" --component ${component})
  endforeach()
endfunction()

# A tiny teacher and texts, and a job that is done in seconds.
function(make_job)
  run("${MAKE_TEACHER}" "${WORK_DIR}/job")
endfunction()
set(tiny_job --teacher "${WORK_DIR}/job/teacher" --text "${WORK_DIR}/job/text.txt" --eval-text "${WORK_DIR}/job/held_out.txt"
  --window 32 --init.tokens 512 --calibrate.tokens 768 --calibrate.steps 5 --eval.context 64 --eval.windows 4
  --agreement.prompts 2 --agreement.prompt_length 8 --agreement.tokens 5)
set(tiny_prompt --prompt "the river" --generate.tokens 4 --quiet)
