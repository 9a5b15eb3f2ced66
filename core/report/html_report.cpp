#include "core/report/html_report.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/json.h"
#include "core/report/chart.h"
#include "core/report/event_file.h"

namespace graft {
namespace {

using nlohmann::json;

constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2330;--dim:#667085;--line:#e4e7ec;--card:#f8f9fb;
--c0:#2563eb;--c1:#e07a1f;--c2:#15915b;--c3:#b4318f;--c4:#7c5cd6;--c5:#8a6d1f}
@media(prefers-color-scheme:dark){:root{--bg:#12161d;--fg:#e6e9ef;--dim:#98a2b3;--line:#2b3340;--card:#1a2029;
--c0:#6ea0ff;--c1:#f0a35c;--c2:#4cc38a;--c3:#e37bc4;--c4:#a893f0;--c5:#d1b25b}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}h1{font-size:24px;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 10px}p.sub{color:var(--dim);margin:0 0 16px;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:21px;font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;min-width:0}
figcaption{font-weight:600}svg{width:100%;height:auto;display:block;font-size:12px}svg text{fill:var(--dim)}
svg .grid{display:inline;stroke:var(--line)}svg .axis{stroke:var(--dim)}svg .mark{stroke:var(--dim);stroke-dasharray:4 4}
svg .join{stroke:var(--dim);stroke-width:1.5}polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}
.b0{fill:var(--c0);background:var(--c0)}.b1{fill:var(--c1);background:var(--c1)}.b2{fill:var(--c2);background:var(--c2)}
.b3{fill:var(--c3);background:var(--c3)}.b4{fill:var(--c4);background:var(--c4)}.b5{fill:var(--c5);background:var(--c5)}
.legend{margin:4px 0 0;color:var(--dim);font-size:13px;display:flex;flex-wrap:wrap;gap:4px 14px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:600}td.wrap{overflow-wrap:anywhere}
blockquote{margin:0 0 12px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;
white-space:pre-wrap;overflow-wrap:anywhere}blockquote b{color:var(--dim);font-weight:600;display:block}
@media(max-width:600px){svg{font-size:17px}}
)css";

std::string tile(const std::string& value, const std::string& what) {
  return "<div class=\"tile\"><b>" + escaped(value) + "</b><span>" + escaped(what) +
         "</span></div>";
}

std::string section(const std::string& title, const std::string& body) {
  return body.empty() ? "" : "<h2>" + escaped(title) + "</h2>" + body;
}

std::string grid(const std::string& figures) {
  return figures.empty() ? "" : "<div class=\"grid\">" + figures + "</div>";
}

std::string tiles(const RunMetrics& metrics) {
  std::string html;
  const RunMetrics::Step* last = nullptr;
  std::int64_t steps = 0;
  for (const auto& stage : metrics.stages) {
    steps += static_cast<std::int64_t>(stage.steps.size());
    if (!stage.steps.empty()) last = &stage.steps.back();
  }
  if (last != nullptr) {
    html += tile(short_number(static_cast<double>(steps)), "steps");
    html += tile(short_number(static_cast<double>(last->tokens)), "tokens");
    html += tile(short_number(last->loss), "last loss");
    html += tile(short_number(last->tokens_per_second), "tokens/s at the end");
  }
  if (!metrics.evaluations.empty()) {
    const auto& evaluation = metrics.evaluations.back();
    html += tile(short_number(evaluation.perplexity), "perplexity, held out");
    if (std::isfinite(evaluation.agreement))
      html += tile(short_number(evaluation.agreement), "greedy agreement with the teacher");
    if (std::isfinite(evaluation.next_token))
      html += tile(short_number(evaluation.next_token), "next token behind its words");
  }
  return html.empty() ? "" : "<div class=\"tiles\">" + html + "</div>";
}

std::vector<Mark> stage_marks(const RunMetrics& metrics) {
  std::vector<Mark> marks;
  for (const auto& stage : metrics.stages)
    if (!stage.steps.empty())
      marks.push_back({static_cast<double>(stage.steps.front().tokens), stage.name});
  return marks;
}

// One figure of every step against tokens; `of` gives it.
template <typename Of>
Series over_tokens(const RunMetrics& metrics, const std::string& name, Of&& of) {
  Series series{name, {}, false};
  for (const auto& stage : metrics.stages)
    for (const auto& step : stage.steps)
      series.points.emplace_back(static_cast<double>(step.tokens), of(step));
  return series;
}

// A log axis where the figures span more than it takes to see the small ones beside the large.
bool wants_log(const std::vector<Series>& series) {
  double least = INFINITY, most = 0;
  for (const Series& s : series)
    for (const auto& [x, y] : s.points) {
      if (!std::isfinite(y)) continue;
      if (y <= 0) return false;
      least = std::min(least, y);
      most = std::max(most, y);
    }
  return most > 20 * least;
}

std::string training(const RunMetrics& metrics) {
  std::set<std::string> parts;
  for (const auto& stage : metrics.stages)
    for (const auto& step : stage.steps)
      for (const auto& [name, value] : step.parts) parts.insert(name);
  std::vector<Series> losses{over_tokens(metrics, "loss", [](const auto& s) { return s.loss; })};
  if (parts.size() > 1)
    for (const std::string& part : parts)
      losses.push_back(over_tokens(metrics, part, [&](const auto& step) {
        const auto at = step.parts.find(part);
        return at == step.parts.end() ? std::nan("") : at->second;
      }));
  const auto marks = stage_marks(metrics);
  std::string figures = draw(LineChart{"Loss", "tokens", "loss", losses, marks, wants_log(losses)});
  figures += draw(LineChart{"Learning rate",
                            "tokens",
                            "lr",
                            {over_tokens(metrics, "lr", [](const auto& s) { return s.lr; })},
                            marks});
  const std::vector<Series> norms{
      over_tokens(metrics, "norm", [](const auto& s) { return s.grad_norm; })};
  figures += draw(
      LineChart{"Gradient norm before clipping", "tokens", "norm", norms, marks, wants_log(norms)});
  figures += draw(LineChart{
      "Speed",
      "tokens",
      "tokens/s",
      {over_tokens(metrics, "tokens/s", [](const auto& s) { return s.tokens_per_second; })},
      marks});
  return grid(figures);
}

std::string quality(const RunMetrics& metrics) {
  Series perplexity{"perplexity", {}, true}, free{"free-running", {}, true},
      forced{"next token behind the teacher's words", {}, true};
  for (const auto& evaluation : metrics.evaluations) {
    const auto tokens = static_cast<double>(evaluation.tokens);
    perplexity.points.emplace_back(tokens, evaluation.perplexity);
    free.points.emplace_back(tokens, evaluation.agreement);
    forced.points.emplace_back(tokens, evaluation.next_token);
  }
  const auto marks = stage_marks(metrics);
  return grid(
      draw(LineChart{"Perplexity on held-out text",
                     "tokens",
                     "perplexity",
                     {perplexity},
                     marks,
                     wants_log({perplexity})}) +
      draw(LineChart{
          "Agreement with the teacher's greedy words", "tokens", "share", {free, forced}, marks}));
}

std::string alignment(const RunMetrics& metrics) {
  std::string figures;
  for (const auto& stage : metrics.stages) {
    if (stage.steps.empty() || stage.steps.front().by_layer.empty()) continue;
    Dumbbells chart{"Loss of each layer: " + stage.name, "loss", {}};
    for (const auto& [layer, before] : stage.steps.front().by_layer) {
      const auto& last = stage.steps.back().by_layer;
      const auto after = last.find(layer);
      chart.rows.push_back(
          {std::to_string(layer), before, after == last.end() ? std::nan("") : after->second});
    }
    figures += draw(chart);
  }
  return grid(figures);
}

std::string gates(const RunMetrics& metrics) {
  HeatMap lives{"Half-life of each head's state", "layer", "head", "tokens", {}, {}, true};
  HeatMap writes{"Write gate of each head, mean", "layer", "head", "", {}, {}, false};
  for (const auto& [layer, values] : metrics.gates) {
    const auto add = [&](HeatMap& chart, const std::vector<double>& row) {
      if (row.empty()) return;
      chart.rows.push_back(std::to_string(layer));
      chart.values.push_back(row);
    };
    add(lives, values.half_life);
    add(writes, values.write_gate);
  }
  return grid(draw(lives) + draw(writes));
}

std::string samples(const RunMetrics& metrics) {
  std::string html;
  for (const auto& sample : metrics.samples)
    html += "<blockquote><b>prompt</b>" + escaped(sample.prompt) + "<b>teacher</b>" +
            escaped(sample.teacher) + "<b>student</b>" + escaped(sample.student) + "</blockquote>";
  return html;
}

std::string shown(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return short_number(value.get<double>());
  if (value.is_array() &&
      std::all_of(value.begin(), value.end(), [](const json& v) { return v.is_primitive(); })) {
    std::string list;
    for (const json& item : value) list += (list.empty() ? "" : ", ") + shown(item);
    return list;
  }
  return value.dump();
}

// Nested objects as dotted names.
void add_rows(const json& object, const std::string& prefix, std::string& rows) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object() && !value.empty())
      add_rows(value, prefix + key + ".", rows);
    else
      rows += "<tr><th>" + escaped(prefix + key) + "</th><td class=\"wrap\">" +
              escaped(shown(value)) + "</td></tr>";
  }
}

std::string made_of(const json& record) {
  std::string rows;
  if (record.is_object()) add_rows(record, "", rows);
  return rows.empty() ? "" : "<div class=\"scroll\"><table>" + rows + "</table></div>";
}

}  // namespace

std::string html_report(const std::string& title, const RunMetrics& metrics, const json& record) {
  std::string names;
  for (const auto& stage : metrics.stages)
    if (!stage.name.empty()) names += (names.empty() ? "" : " → ") + stage.name;
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>" +
         escaped(title) + "</title><style>" + kStyle + "</style></head><body><main><h1>" +
         escaped(title) + "</h1><p class=\"sub\">" + escaped(names) + "</p>" + tiles(metrics) +
         section("Training", training(metrics)) + section("Held-out text", quality(metrics)) +
         section("Alignment, before and after", alignment(metrics)) +
         section("What the gates do", gates(metrics)) + section("Samples", samples(metrics)) +
         section("What the run was made of", made_of(record)) + "</main></body></html>\n";
}

void write_report(const std::filesystem::path& run) {
  const auto log = run / "metrics.jsonl", record = run / "run.json";
  if (!std::filesystem::exists(log))
    fail(ErrorKind::input, quoted_path(run) +
                               " is no run's folder: it has no metrics.jsonl (hostapp "
                               "train --out DIR makes one)");
  const RunMetrics metrics = read_metrics(run);
  const json made = std::filesystem::exists(record) ? read_json(record) : json();
  write_file_atomically(
      run / "report.html",
      html_report(std::filesystem::absolute(run).lexically_normal().filename().string(), metrics,
                  made));
  write_events(run / "events", metrics);
}

}  // namespace graft
