// make_teacher FOLDER: a tiny teacher and texts, for a job of an installed hostapp.
#include "tests/integration/cli_testing.h"

int main(int argc, char** argv) {
  if (argc != 2) return 1;
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder);
  graft::make_tiny_teacher(folder / "teacher");
  graft::write_file_atomically(folder / "text.txt", graft::made_up_prose(1, 12000));
  graft::write_file_atomically(folder / "held_out.txt",
                               "Another text entirely. " + graft::made_up_prose(77, 4000));
}
