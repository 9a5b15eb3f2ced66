# Run as a script by graft_add_plugin(): writes <PLUGIN without .so>.graftplugin.toml.
# ABI: the version of the header it is built with, which is the one it picks; so it fits each host that offers it.
#   -DPLUGIN=file -DID= -DLICENSE= -DABI=1.0 -DTAGS=a=1|b=2 -DALIASES=x|y
file(SHA256 "${PLUGIN}" sha256)
cmake_path(GET PLUGIN FILENAME file)
cmake_path(REPLACE_EXTENSION PLUGIN LAST_ONLY ".graftplugin.toml" OUTPUT_VARIABLE sidecar)
string(REPLACE "|" ";" tags "${TAGS}")
set(aliases "")
if(ALIASES)
  string(REPLACE "|" "\", \"" aliases "\"${ALIASES}\"")
endif()
file(WRITE "${sidecar}" "# What graft reads before it opens ${file}.
id = \"${ID}\"
aliases = [${aliases}]
license = \"${LICENSE}\"
abi_min = \"${ABI}\"
abi_max = \"${ABI}\"
build_tags = \"${tags}\"
sha256 = \"${sha256}\"
")
