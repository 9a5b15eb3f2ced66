#include "core/report/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

namespace graft {
namespace {

constexpr double kWidth = 640, kHeight = 300;
constexpr double kLeft = 58, kRight = 14, kTop = 34, kBottom = 44;
constexpr std::size_t kMostPoints = 600;

std::string fixed(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

// One axis: from a figure to a place on the page.
struct Axis {
  double low = 0, high = 1;  // of the figure, or of its log10
  bool log = false;
  double from = 0, to = 1;  // on the page

  double place(double value) const {
    const double v = log ? std::log10(value) : value;
    return from + (v - low) / (high - low) * (to - from);
  }

  std::vector<double> ticks() const {
    std::vector<double> values;
    if (log) {
      for (double decade = std::floor(low); decade <= high; ++decade)
        for (const double digit : {1.0, 2.0, 5.0}) {
          const double at = decade + std::log10(digit);
          if (at >= low && at <= high) values.push_back(std::pow(10.0, at));
        }
      // Over many decades the 2 and 5 would stand in each other's way.
      if (values.size() > 7)
        std::erase_if(values, [](double v) {
          const double exponent = std::log10(v);
          return std::abs(exponent - std::round(exponent)) > 1e-6;
        });
      return values;
    }
    const double raw = (high - low) / 5, unit = std::pow(10.0, std::floor(std::log10(raw)));
    const double step = (raw / unit < 1.5   ? 1
                         : raw / unit < 3.5 ? 2
                         : raw / unit < 7.5 ? 5
                                            : 10) *
                        unit;
    for (double v = std::ceil(low / step) * step; v <= high + step * 1e-6; v += step)
      values.push_back(std::abs(v) < step * 1e-6 ? 0 : v);
    return values;
  }
};

// Spans the values with a little room; a single value stands in the middle.
Axis spanning(const std::vector<double>& values, bool log, double room) {
  Axis axis;
  axis.log = log;
  axis.low = std::numeric_limits<double>::infinity();
  axis.high = -axis.low;
  for (const double value : values) {
    const double v = log ? std::log10(value) : value;
    axis.low = std::min(axis.low, v);
    axis.high = std::max(axis.high, v);
  }
  double margin = (axis.high - axis.low) * room;
  if (!(axis.high - axis.low > 1e-12 * std::max(1.0, std::abs(axis.high))))
    margin = log ? 0.5 : std::max(std::abs(axis.high) * 0.5, 1e-9);
  axis.low -= margin;
  axis.high += margin;
  return axis;
}

bool drawable(const std::pair<double, double>& point, bool log) {
  return std::isfinite(point.first) && std::isfinite(point.second) && (!log || point.second > 0);
}

// Of each stretch of points its lowest and highest, in their order.
std::vector<std::pair<double, double>> thinned(
    const std::vector<std::pair<double, double>>& points) {
  if (points.size() <= kMostPoints) return points;
  std::vector<std::pair<double, double>> kept{points.front()};
  const std::size_t stretches = kMostPoints / 2;
  for (std::size_t i = 0; i < stretches; ++i) {
    const auto first = points.begin() + static_cast<std::ptrdiff_t>(i * points.size() / stretches);
    const auto last =
        points.begin() + static_cast<std::ptrdiff_t>((i + 1) * points.size() / stretches);
    const auto by_y = [](const auto& a, const auto& b) { return a.second < b.second; };
    auto [low, high] = std::minmax_element(first, last, by_y);
    if (high < low) std::swap(low, high);
    kept.push_back(*low);
    if (high != low) kept.push_back(*high);
  }
  kept.push_back(points.back());
  return kept;
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "") {
  return "<text x=\"" + fixed(x) + "\" y=\"" + fixed(y) + "\" text-anchor=\"" + anchor + "\"" +
         more + ">" + escaped(text) + "</text>";
}

std::string line_at(double x1, double y1, double x2, double y2, const std::string& css) {
  return "<line x1=\"" + fixed(x1) + "\" y1=\"" + fixed(y1) + "\" x2=\"" + fixed(x2) + "\" y2=\"" +
         fixed(y2) + "\" class=\"" + css + "\"/>";
}

std::string opening(const std::string& title, double height) {
  return "<figure><figcaption>" + escaped(title) + "</figcaption><svg viewBox=\"0 0 " +
         fixed(kWidth) + " " + fixed(height) + "\" role=\"img\" aria-label=\"" + escaped(title) +
         "\">";
}

std::string axes(const Axis& x, const Axis& y, const std::string& x_label,
                 const std::string& y_label) {
  std::string svg;
  for (const double tick : y.ticks()) {
    svg += line_at(x.from, y.place(tick), x.to, y.place(tick), "grid");
    svg += text_at(x.from - 6, y.place(tick) + 4, "end", short_number(tick));
  }
  for (const double tick : x.ticks())
    svg += text_at(x.place(tick), y.from + 17, "middle", short_number(tick));
  svg += line_at(x.from, y.from, x.to, y.from, "axis");
  svg += text_at((x.from + x.to) / 2, y.from + 36, "middle", x_label);
  svg += text_at(x.from - 50, y.to - 12, "start", y_label);
  return svg;
}

std::string legend(const std::vector<Series>& series) {
  if (series.size() < 2) return "";
  std::string html = "<p class=\"legend\">";
  for (std::size_t i = 0; i < series.size(); ++i)
    html += "<span><i class=\"b" + std::to_string(i % 6) + "\"></i>" + escaped(series[i].name) +
            "</span>";
  return html + "</p>";
}

std::string polyline(const Series& series, std::size_t colour, const Axis& x, const Axis& y) {
  std::string path, dots;
  for (const auto& point : thinned(series.points)) {
    path += fixed(x.place(point.first)) + "," + fixed(y.place(point.second)) + " ";
    if (series.markers || series.points.size() == 1)
      dots += "<circle r=\"3.5\" class=\"b" + std::to_string(colour) + "\" cx=\"" +
              fixed(x.place(point.first)) + "\" cy=\"" + fixed(y.place(point.second)) +
              "\"><title>" + escaped(series.name) + ": " + short_number(point.second) + " at " +
              short_number(point.first) + "</title></circle>";
  }
  return "<polyline class=\"s" + std::to_string(colour) + "\" points=\"" + path + "\"/>" + dots;
}

// Where a value lies between the least and the most, 0 to 1.
struct Scale {
  double low, high;
  bool log;
  double operator()(double value) const {
    if (std::isinf(value)) return value > 0 ? 1 : 0;
    const double v = log ? std::log(value) : value;
    return high > low ? std::clamp((v - low) / (high - low), 0.0, 1.0) : 0.5;
  }
};

std::optional<Scale> scale_of(const HeatMap& chart) {
  Scale scale{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
              chart.log_scale};
  for (const auto& row : chart.values)
    for (const double value : row) {
      if (!std::isfinite(value) || (chart.log_scale && value <= 0)) continue;
      const double v = chart.log_scale ? std::log(value) : value;
      scale.low = std::min(scale.low, v);
      scale.high = std::max(scale.high, v);
    }
  if (!(scale.low <= scale.high)) return std::nullopt;
  return scale;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string short_number(double value) {
  if (std::isnan(value)) return "-";
  if (std::isinf(value)) return value > 0 ? "∞" : "-∞";
  std::array<char, 48> text{};
  const double size = std::abs(value);
  if (size >= 999.5e3)
    std::snprintf(text.data(), text.size(), "%.4gM", value / 1e6);
  else if (size >= 9999.5)
    std::snprintf(text.data(), text.size(), "%.3gk", value / 1e3);
  else if (size > 0 && size < 0.9995e-3) {
    // 3e-4 where printf would write 0.0003 or 3e-04: beside an axis on a phone there is room for
    // six characters.
    const int exponent = static_cast<int>(std::floor(std::log10(size * 1.0005)));
    std::snprintf(text.data(), text.size(), "%.3ge%d", value / std::pow(10.0, exponent), exponent);
  } else
    std::snprintf(text.data(), text.size(), size >= 1000 ? "%.0f" : "%.3g", value);
  return text.data();
}

std::string draw(const LineChart& given) {
  LineChart chart = given;
  std::vector<double> xs, ys;
  for (Series& series : chart.series) {
    std::erase_if(series.points, [&](const auto& point) { return !drawable(point, chart.log_y); });
    for (const auto& [x, y] : series.points) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  std::erase_if(chart.series, [](const Series& series) { return series.points.empty(); });
  if (xs.empty()) return "";
  Axis x = spanning(xs, false, 0.0), y = spanning(ys, chart.log_y, 0.06);
  x.from = kLeft;
  x.to = kWidth - kRight;
  y.from = kHeight - kBottom;
  y.to = kTop;
  std::string svg = opening(chart.title, kHeight) + axes(x, y, chart.x_label, chart.y_label);
  for (const Mark& mark : chart.marks) {
    if (mark.x < x.low || mark.x > x.high) continue;
    svg += line_at(x.place(mark.x), y.from, x.place(mark.x), y.to, "mark");
    svg += text_at(x.place(mark.x) + 4, y.to + 10, "start", mark.label, " class=\"dim\"");
  }
  for (std::size_t i = 0; i < chart.series.size(); ++i)
    svg += polyline(chart.series[i], i % 6, x, y);
  return svg + "</svg>" + legend(chart.series) + "</figure>";
}

std::string draw(const Dumbbells& given) {
  Dumbbells chart = given;
  std::erase_if(chart.rows, [](const auto& row) {
    return !std::isfinite(row.before) || !std::isfinite(row.after);
  });
  if (chart.rows.empty()) return "";
  std::vector<double> values{0};
  for (const auto& row : chart.rows) {
    values.push_back(row.before);
    values.push_back(row.after);
  }
  Axis y = spanning(values, false, 0.05);
  y.low = std::min(0.0, *std::min_element(values.begin(), values.end()));
  y.from = kHeight - kBottom;
  y.to = kTop;
  Axis x;
  x.from = kLeft;
  x.to = kWidth - kRight;
  const auto count = static_cast<double>(chart.rows.size());
  std::string svg = opening(chart.title, kHeight);
  for (const double tick : y.ticks()) {
    svg += line_at(x.from, y.place(tick), x.to, y.place(tick), "grid");
    svg += text_at(x.from - 6, y.place(tick) + 4, "end", short_number(tick));
  }
  const std::size_t every = (chart.rows.size() + 15) / 16;
  for (std::size_t i = 0; i < chart.rows.size(); ++i) {
    const auto& row = chart.rows[i];
    const double at = x.place((static_cast<double>(i) + 0.5) / count);
    const std::string title = "<title>layer " + escaped(row.name) + ": " +
                              short_number(row.before) + " → " + short_number(row.after) +
                              "</title>";
    svg += line_at(at, y.place(row.before), at, y.place(row.after), "join");
    for (const auto& [value, css] : {std::pair(row.before, "b1"), std::pair(row.after, "b0")})
      svg += "<circle r=\"4.5\" class=\"" + std::string(css) + "\" cx=\"" + fixed(at) + "\" cy=\"" +
             fixed(y.place(value)) + "\">" + title + "</circle>";
    if (i % every == 0) svg += text_at(at, y.from + 17, "middle", row.name);
  }
  svg += line_at(x.from, y.from, x.to, y.from, "axis");
  svg += text_at((x.from + x.to) / 2, y.from + 36, "middle", "layer");
  svg += text_at(x.from - 50, y.to - 12, "start", chart.y_label);
  return svg +
         "</svg><p class=\"legend\"><span><i class=\"b1\"></i>before</span><span><i class=\"b0\">"
         "</i>after</span></p></figure>";
}

std::string draw(const HeatMap& chart) {
  const auto scale = scale_of(chart);
  if (!scale) return "";
  std::size_t columns = 0;
  for (const auto& row : chart.values) columns = std::max(columns, row.size());
  const double width = std::min(60.0, (kWidth - kLeft - kRight) / static_cast<double>(columns));
  const double height = 18, bottom = kTop + height * static_cast<double>(chart.rows.size());
  std::string svg = opening(chart.title, bottom + kBottom);
  for (std::size_t r = 0; r < chart.rows.size(); ++r) {
    const double top = kTop + height * static_cast<double>(r);
    svg += text_at(kLeft - 6, top + 13, "end", chart.rows[r]);
    for (std::size_t c = 0; c < chart.values[r].size(); ++c) {
      const double value = chart.values[r][c];
      if (std::isnan(value)) continue;
      std::array<char, 48> shade{};
      std::snprintf(shade.data(), shade.size(), "%.3f", 0.06 + 0.94 * (*scale)(value));
      svg += "<rect class=\"b0\" x=\"" + fixed(kLeft + width * static_cast<double>(c)) + "\" y=\"" +
             fixed(top) + "\" width=\"" + fixed(width - 1) + "\" height=\"" + fixed(height - 1) +
             "\" fill-opacity=\"" + shade.data() + "\"><title>" + escaped(chart.row_label) + " " +
             escaped(chart.rows[r]) + ", " + escaped(chart.column_label) + " " + std::to_string(c) +
             ": " + short_number(value) + " " + escaped(chart.unit) + "</title></rect>";
    }
  }
  const std::size_t every = width >= 24 ? 1 : static_cast<std::size_t>(std::ceil(24 / width));
  for (std::size_t c = 0; c < columns; c += every)
    svg += text_at(kLeft + width * (static_cast<double>(c) + 0.5), bottom + 16, "middle",
                   std::to_string(c));
  svg += text_at(kLeft, bottom + 36, "start", chart.column_label);
  svg += text_at(kLeft - 50, kTop - 12, "start", chart.row_label);
  const double low = chart.log_scale ? std::exp(scale->low) : scale->low;
  const double high = chart.log_scale ? std::exp(scale->high) : scale->high;
  return svg + "</svg><p class=\"legend\">faint: " + short_number(low) +
         ", full: " + short_number(high) + " " + escaped(chart.unit) + "</p></figure>";
}

}  // namespace graft
