# graft_add_plugin(): a plugin as the loader wants it, in this tree and against an installed graft.
#
#   graft_add_plugin(<name>
#     SOURCES <source>...
#     ID <reverse.dns.id>        the library's id, as in graft_plugin.id
#     LICENSE <SPDX>             as in graft_plugin.license
#     [ALIASES <alias>...]       of every component in it: the loader then opens the file only when one is asked for
#     [LIBS <target>...]
#     [RECIPES <file>...]        <mixer>-<initializer>.toml: what `--mixer M --init I` means; they lie beside the plugin
#     [TORCH]                    links LibTorch
#     [NO_INSTALL])
#
# Makes the target <name>: <name>.so and its sidecar <name>.graftplugin.toml in GRAFT_PLUGIN_OUTPUT_DIRECTORY
# (by default plugins/ in the build tree), both installed to lib/graft/plugins. The one symbol it exports
# is graft_plugin_negotiate, and an undefined symbol is an error of the link, not of a later load.

set(GRAFT_PLUGIN_CMAKE_DIR "${CMAKE_CURRENT_LIST_DIR}")

# graft_build_tags(<out> [TORCH]): what host and plugin have to agree on when both link LibTorch; "" otherwise.
function(graft_build_tags out)
  set(tags "")
  if("TORCH" IN_LIST ARGN)
    string(TOLOWER "${CMAKE_CXX_COMPILER_ID}" compiler)
    string(REPLACE "gnu" "gcc" compiler "${compiler}")
    string(REGEX MATCH "^[0-9]+" major "${CMAKE_CXX_COMPILER_VERSION}")
    # LibTorch is built with the C++11 ABI since 2.7.
    set(tags "compiler=${compiler}-${major}|cxx11abi=1|libtorch=${LibTorch_VERSION}")
  endif()
  # CMake would split a value with semicolons at each step on its way: '|' stands for them until the
  # text is written down.
  set(${out} "${tags}" PARENT_SCOPE)
endfunction()

# graft_define_build_tags(<out> <macro> <tags>): the compile definition of a C string that holds them.
function(graft_define_build_tags out macro tags)
  string(REPLACE "|" "\\073" text "${tags}")
  set(${out} "${macro}=\"${text}\"" PARENT_SCOPE)
endfunction()

function(graft_add_plugin name)
  cmake_parse_arguments(ARG "TORCH;NO_INSTALL" "ID;LICENSE" "SOURCES;ALIASES;LIBS;RECIPES" ${ARGN})
  foreach(needed SOURCES ID LICENSE)
    if(NOT ARG_${needed})
      message(FATAL_ERROR "graft_add_plugin(${name}): ${needed} is missing")
    endif()
  endforeach()
  if(ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "graft_add_plugin(${name}): unknown argument ${ARG_UNPARSED_ARGUMENTS}")
  endif()
  if(ARG_TORCH AND NOT TARGET LibTorch::torch)
    find_package(LibTorch 2.8 REQUIRED)
  endif()

  add_library(${name} MODULE ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE graft::sdk ${ARG_LIBS})
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if("CXX" IN_LIST languages)
    target_compile_features(${name} PRIVATE cxx_std_20)
  endif()
  if(TARGET graft_compile_options)
    target_link_libraries(${name} PRIVATE graft_compile_options)
  endif()
  if(COMMAND graft_unity_build)
    graft_unity_build(${name})
  endif()
  _graft_plugin_hide_symbols(${name})
  set_property(GLOBAL APPEND PROPERTY GRAFT_PLUGINS ${name})

  set(tag_kind "")
  if(ARG_TORCH)
    target_link_libraries(${name} PRIVATE LibTorch::torch)
    if(COMMAND graft_use_torch_pch)
      graft_use_torch_pch(${name})
    endif()
    set(tag_kind TORCH)
  endif()
  graft_build_tags(tags ${tag_kind})
  graft_define_build_tags(definition GRAFT_BUILD_TAGS "${tags}")
  target_compile_definitions(${name} PRIVATE "${definition}")

  set(output "${GRAFT_PLUGIN_OUTPUT_DIRECTORY}")
  if(NOT output)
    set(output "${CMAKE_BINARY_DIR}/plugins")
  endif()
  # Installed as it was linked: another RPATH would be another file than the sidecar's hash speaks of.
  set_target_properties(${name} PROPERTIES
    PREFIX "" SUFFIX ".so"
    LIBRARY_OUTPUT_DIRECTORY "${output}"
    BUILD_WITH_INSTALL_RPATH TRUE
    INSTALL_RPATH "$<$<BOOL:${ARG_TORCH}>:${LibTorch_LIBRARY_DIR}>")
  _graft_plugin_sidecar(${name} "${output}" "${tags}")
  foreach(recipe IN LISTS ARG_RECIPES)
    cmake_path(GET recipe FILENAME recipe_name)
    configure_file("${recipe}" "${output}/${recipe_name}" COPYONLY)
    if(NOT ARG_NO_INSTALL)
      install(FILES "${recipe}" DESTINATION lib/graft/plugins COMPONENT plugins)
    endif()
  endforeach()
endfunction()

function(_graft_plugin_hide_symbols name)
  set_target_properties(${name} PROPERTIES
    C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN TRUE
    LINK_DEPENDS "${GRAFT_PLUGIN_CMAKE_DIR}/graft_plugin.version")
  # Unique symbols would be shared between plugins in spite of RTLD_LOCAL.
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
  target_link_options(${name} PRIVATE
    "LINKER:--version-script=${GRAFT_PLUGIN_CMAKE_DIR}/graft_plugin.version"
    "LINKER:--exclude-libs,ALL")
  # A sanitizer's run time comes with the executable: its symbols stay open here.
  if(NOT GRAFT_SANITIZE AND NOT "${CMAKE_C_FLAGS} ${CMAKE_CXX_FLAGS} ${CMAKE_MODULE_LINKER_FLAGS}" MATCHES "-fsanitize")
    target_link_options(${name} PRIVATE "LINKER:-z,defs")
  endif()
endfunction()

# Reads the ARG_ variables of graft_add_plugin().
function(_graft_plugin_sidecar name output tags)
  string(REPLACE ";" "|" aliases "${ARG_ALIASES}")
  set(fields "-DID=${ARG_ID}" "-DLICENSE=${ARG_LICENSE}" "-DABI=${GRAFT_ABI}" "-DTAGS=${tags}" "-DALIASES=${aliases}")
  set(script "${GRAFT_PLUGIN_CMAKE_DIR}/GraftSidecar.cmake")
  add_custom_command(TARGET ${name} POST_BUILD
    COMMAND "${CMAKE_COMMAND}" "-DPLUGIN=$<TARGET_FILE:${name}>" ${fields} -P "${script}"
    BYPRODUCTS "${output}/${name}.graftplugin.toml"
    VERBATIM)
  if(NOT ARG_NO_INSTALL)
    # Stripping on the way changes the file, and with it the hash in the sidecar.
    list(JOIN fields "\" \"" fields)
    install(TARGETS ${name} LIBRARY DESTINATION lib/graft/plugins COMPONENT plugins)
    install(CODE "
      execute_process(COMMAND \"${CMAKE_COMMAND}\"
        \"-DPLUGIN=\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib/graft/plugins/${name}.so\"
        \"${fields}\" -P \"${script}\" COMMAND_ERROR_IS_FATAL ANY)" COMPONENT plugins)
  endif()
endfunction()
