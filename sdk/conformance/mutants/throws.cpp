// Linked into the mutant THROWS.
#include <stdexcept>

extern "C" void throws();
void throws() { throw std::runtime_error("an exception of the plugin's"); }
