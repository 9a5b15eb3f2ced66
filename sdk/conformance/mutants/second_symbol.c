/* Linked into the mutant SECOND_SYMBOL. */
#include "graft/graft.h"

GRAFT_EXPORT int helper(void);
int helper(void) { return 2; }
