# Compares the ABI of today's header with that of the last release, through libabigail.
#   -DCC= -DABIDW= -DABIDIFF= -DSOURCE=tests/abi -DINCLUDE=sdk/include -DOUT=<folder> -DRELEASED=<dump> -P surface_test.cmake
# With -DWRITE=ON the dump is written instead: once, when a version is released.
if(NOT ABIDW OR NOT ABIDIFF)
  message("SKIP: abidw and abidiff are not installed (Debian: abigail-tools)")
  return()
endif()
file(MAKE_DIRECTORY "${OUT}")
execute_process(COMMAND "${CC}" -std=c11 -g -O0 -shared -fPIC "-I${INCLUDE}" surface.c -o "${OUT}/surface.so"
  WORKING_DIRECTORY "${SOURCE}" COMMAND_ERROR_IS_FATAL ANY)
set(dump "${OUT}/graft.abi")
if(WRITE)
  set(dump "${RELEASED}")
endif()
execute_process(
  COMMAND "${ABIDW}" --no-corpus-path --no-comp-dir-path --no-show-locs --out-file "${dump}" "${OUT}/surface.so"
  COMMAND_ERROR_IS_FATAL ANY)
if(WRITE)
  return()
endif()
execute_process(COMMAND "${ABIDIFF}" --harmless "${RELEASED}" "${dump}" OUTPUT_VARIABLE report RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${report}\nThis differs from what ${RELEASED} was published as. A minor version adds at the end of "
    "structs and no more (docs/abi.md, Versions); say it in docs/abi-changelog.md and freeze the version's own dump.")
endif()
