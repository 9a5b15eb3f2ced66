#pragma once

#include <string>
#include <utility>
#include <vector>

namespace graft {

// Charts as SVG elements that stand inside an HTML page: no script, no file beside. Colours come
// from the page's style (classes s0 to s5, and currentColor), so that they follow its theme.

struct Series {
  std::string name;
  std::vector<std::pair<double, double>>
      points;            // ascending x; those that are no numbers are left out
  bool markers = false;  // a dot at each point, beside the line
};

struct Mark {
  double x;
  std::string label;
};

struct LineChart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  std::vector<Mark> marks{};  // vertical lines: where a stage begins
  bool log_y = false;         // points at or below 0 are left out
};
// "" when there is nothing to draw. Long series are thinned to their extremes, so that a spike is
// still seen.
std::string draw(const LineChart& chart);

// For each row two values, joined: before and after.
struct Dumbbells {
  std::string title, y_label;
  struct Row {
    std::string name;
    double before, after;
  };
  std::vector<Row> rows;
};
std::string draw(const Dumbbells& chart);

// A value for each cell; NaN stays empty, infinity is drawn as the largest.
struct HeatMap {
  std::string title, row_label, column_label, unit;
  std::vector<std::string> rows;
  std::vector<std::vector<double>> values;  // one list a row
  bool log_scale = false;
};
std::string draw(const HeatMap& chart);

// <, >, & and quotes as HTML writes them.
std::string escaped(const std::string& text);
// Three significant digits, thousands as k and M.
std::string short_number(double value);

}  // namespace graft
