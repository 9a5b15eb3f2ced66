#include "core/loader/elf_check.h"

#include <elf.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <system_error>
#include <vector>

namespace graft {
namespace {

#if defined(__x86_64__)
constexpr std::uint16_t kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr std::uint16_t kMachine = EM_AARCH64;
#else
#error "name this processor's ELF machine here"
#endif

constexpr unsigned char kByteOrder =
    std::endian::native == std::endian::little ? ELFDATA2LSB : ELFDATA2MSB;

// Is [offset, offset + bytes) within a file of `size` bytes?
bool inside(std::uint64_t offset, std::uint64_t bytes, std::uint64_t size) {
  return offset <= size && bytes <= size - offset;
}

template <class T>
bool read_at(std::ifstream& in, std::uint64_t offset, T* to, std::size_t count) {
  in.seekg(static_cast<std::streamoff>(offset));
  in.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(T)));
  return in.good();
}

}  // namespace

std::string elf_fault(const std::filesystem::path& file) {
  static const std::string cut = "is cut off: it is shorter than its ELF header says";
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(file, error);
  std::ifstream in(file, std::ios::binary);
  if (error || !in) return "cannot be read";

  unsigned char ident[EI_NIDENT] = {};
  in.read(reinterpret_cast<char*>(ident), sizeof ident);
  if (std::memcmp(ident, ELFMAG, SELFMAG) != 0) return "is not a shared library (no ELF header)";
  Elf64_Ehdr header{};
  in.clear();
  if (ident[EI_CLASS] != ELFCLASS64 || ident[EI_DATA] != kByteOrder) {
    return size < sizeof header ? cut : "is for another kind of processor";
  }
  if (!read_at(in, 0, &header, 1)) return cut;
  if (header.e_machine != kMachine) return "is for another kind of processor";
  if (header.e_type != ET_DYN) return "is an ELF file, but no shared library";

  if (header.e_phentsize != sizeof(Elf64_Phdr)) return "has a damaged ELF header";
  const std::uint64_t table = std::uint64_t{header.e_phnum} * sizeof(Elf64_Phdr);
  if (!inside(header.e_phoff, table, size)) return cut;
  std::vector<Elf64_Phdr> segments(header.e_phnum);
  if (!segments.empty() && !read_at(in, header.e_phoff, segments.data(), segments.size()))
    return cut;
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_type == PT_LOAD && !inside(segment.p_offset, segment.p_filesz, size)) return cut;
  }
  return "";
}

}  // namespace graft
