#include "gdn_mixer.h"

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.gdn",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = "0.1.0",
                                             .license = "Apache-2.0"}),
                    graft::sdk::mixer<graft::gdn::GatedDeltaNet>())
