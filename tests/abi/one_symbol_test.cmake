execute_process(COMMAND "${NM}" -D --defined-only "${FILE}"
  OUTPUT_VARIABLE symbols OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES "^[0-9a-f]+ T graft_plugin_negotiate$")
  message(FATAL_ERROR "${FILE} exports:\n${symbols}")
endif()
