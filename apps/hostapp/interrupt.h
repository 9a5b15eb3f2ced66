#pragma once

namespace graft {

// From now on Ctrl-C (SIGINT) and SIGTERM set a flag, so that the step at work can end and clean
// up. A second one ends the process at once.
void catch_interrupts();

bool interrupted();

}  // namespace graft
