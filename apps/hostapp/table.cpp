#include "apps/hostapp/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace graft {
namespace {

std::size_t columns_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;  // UTF-8: one column for each character
  }));
}

bool is_number(const std::string& cell) {
  return cell.empty() || cell == "-" || cell == "inf" || cell == "nan" ||
         cell.find_first_not_of("0123456789.,+-e%:") == std::string::npos;
}

}  // namespace

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  std::vector<bool> right;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    widths.resize(std::max(widths.size(), rows[r].size()), 0);
    right.resize(widths.size(), rows.size() > 1);
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      widths[c] = std::max(widths[c], columns_of(rows[r][c]));
      if (r > 0 && !is_number(rows[r][c])) right[c] = false;
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - columns_of(row[c]), ' ');
      line += (c > 0 ? "  " : "") + (right[c] ? padding + row[c] : row[c] + padding);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string format_figure(double value) {
  char buffer[40];
  const double size = std::abs(value);
  const char* const format = size >= 1e6    ? "%.2g"
                             : size >= 1000 ? "%.0f"
                             : size >= 100  ? "%.1f"
                                            : "%.2f";
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

}  // namespace graft
