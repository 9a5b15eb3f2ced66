# Filled in by graft_add_plugin(); see below.
