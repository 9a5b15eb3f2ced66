#include "kit/elf_file.h"

#include <elf.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>

#include "kit/verdict.h"

namespace graft::conformance {
namespace {

// The struct at an offset of the file.
template <class T>
T at(const std::vector<char>& bytes, std::uint64_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T))
    fail("the file ends before its ELF tables do: it is cut");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

std::string text_at(const std::vector<char>& bytes, std::uint64_t offset) {
  if (offset >= bytes.size()) fail("the file ends before its ELF names do: it is cut");
  return std::string(bytes.data() + offset,
                     ::strnlen(bytes.data() + offset, bytes.size() - offset));
}

bool exported(const Elf64_Sym& symbol) {
  const auto bind = ELF64_ST_BIND(symbol.st_info);
  const auto visibility = ELF64_ST_VISIBILITY(symbol.st_other);
  // SHN_ABS: the name of a version, not of a thing.
  return symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS && bind != STB_LOCAL &&
         (visibility == STV_DEFAULT || visibility == STV_PROTECTED);
}

}  // namespace

std::vector<char> read_bytes(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) fail("cannot read '", file.string(), "'");
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::vector<std::string> exported_symbols(const std::filesystem::path& file) {
  const std::vector<char> bytes = read_bytes(file);
  const auto header = at<Elf64_Ehdr>(bytes, 0);
  constexpr unsigned char kOrder =
      std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != kOrder)
    skip("the file is no 64-bit ELF library of this machine");
  std::vector<std::string> out;
  for (std::uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = at<Elf64_Shdr>(bytes, header.e_shoff + i * sizeof(Elf64_Shdr));
    if (section.sh_type != SHT_DYNSYM) continue;
    const auto names = at<Elf64_Shdr>(bytes, header.e_shoff + section.sh_link * sizeof(Elf64_Shdr));
    for (std::uint64_t s = 0; s < section.sh_size / sizeof(Elf64_Sym); ++s) {
      const auto symbol = at<Elf64_Sym>(bytes, section.sh_offset + s * sizeof(Elf64_Sym));
      if (exported(symbol)) out.push_back(text_at(bytes, names.sh_offset + symbol.st_name));
    }
    return out;
  }
  skip("the file has no section of dynamic symbols: its section headers are stripped");
}

}  // namespace graft::conformance
