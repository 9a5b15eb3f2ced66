#pragma once

#include <string>
#include <vector>

namespace graft {

// Rows of text as aligned columns, two spaces apart; the first row is the head. Columns that hold
// only numbers (and empty or "-" cells) below the head are aligned to the right. Every line ends
// with a newline.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

// 36.58, 120.4, 37124, 1.2e+07: four digits or so, whole above a thousand.
std::string format_figure(double value);

}  // namespace graft
