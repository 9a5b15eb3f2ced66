// kit_user PLUGIN: the kit's tests of forward passes, from a program of an author's own.
#include <cstdio>
#include <string_view>

#include "graft/conformance/conformance.hpp"

int main(int argc, char** argv) {
  namespace kit = graft::conformance;
  if (argc != 2) return 1;
  kit::Settings settings;
  settings.plugin = argv[1];
  int failed = 0;
  for (const kit::Subject& subject : kit::subjects_of(settings)) {
    for (const kit::Test& test : kit::tests_for(subject)) {
      if (!std::string_view(test.id).starts_with("forward.")) continue;
      const kit::Result result = kit::run_in_child(test, subject, settings);
      std::printf("%s %s %s\n", kit::name_of(result.verdict), test.id, result.detail.c_str());
      if (result.verdict == kit::Verdict::fail) ++failed;
    }
  }
  return failed;
}
