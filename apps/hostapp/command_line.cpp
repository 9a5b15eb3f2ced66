#include "apps/hostapp/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/config/keys.h"

namespace graft {
namespace {

// Flags that are no keys of the configuration.
const std::vector<std::string>& own_flags() {
  static const std::vector<std::string> flags = {
      "--config",  "--set",    "--print-config", "--help",    "--version",  "--quiet",
      "--verbose", "--resume", "--allow-change", "--student", "--id-prefix"};
  return flags;
}

// What the options of plugins become, which no parser can know.
constexpr const char* plugin_option = "--plugin-option";

std::string with_underscores(std::string text) {
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

bool is_list(ValueType type) {
  return type == ValueType::integers || type == ValueType::numbers || type == ValueType::strings;
}

// The key a flag (without its dashes) stands for: its short name or its dotted one, '-' as good as
// '_'.
const Key* key_of_flag(const std::string& name) {
  for (const Key& key : graft_schema().keys) {
    if (key.flag == "--" + name || key.name == with_underscores(name)) return &key;
  }
  return nullptr;
}

[[noreturn]] void fail_unknown_flag(const std::string& flag) {
  const std::string name = flag.substr(2);
  std::vector<std::string> known = own_flags();
  for (const Key& key : graft_schema().keys) known.push_back(flag_of(key.name));
  auto near = nearest(flag, known);
  if (!near) {
    const auto key = graft_schema().nearest_name(with_underscores(name));
    if (key && graft_schema().find_key(*key)) near = flag_of(*key);
  }
  fail(ErrorKind::usage,
       "unknown flag " + quoted(flag) +
           (near ? " (did you mean " + quoted(*near) + "?)" : "; hostapp --help lists them all"));
}

// Flags of our own that take a value.
bool takes_value(const std::string& own_flag) {
  return own_flag == "--config" || own_flag == "--set" || own_flag == "--student" ||
         own_flag == "--id-prefix";
}

// A flag without '=' takes the next word, which must be there and no flag itself.
void require_value(const std::vector<std::string>& arguments, std::size_t flag_at) {
  const std::string& flag = arguments[flag_at];
  const std::string missing = flag + ": a value is missing";
  if (flag_at + 1 == arguments.size()) fail(ErrorKind::usage, missing);
  const std::string& next = arguments[flag_at + 1];
  if (next.starts_with("--"))
    fail(ErrorKind::usage, missing + ", " + quoted(next) +
                               " is a flag (a value that begins with -- is given as " + flag +
                               "=VALUE)");
}

// Brings every flag into the one spelling that the parser knows: keys as flag_of() has them,
// switches with a value, options of plugins (which no parser can know) as --set.
std::vector<std::string> in_one_spelling(const std::vector<std::string>& arguments) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      out.insert(out.end(), arguments.begin() + static_cast<std::ptrdiff_t>(i), arguments.end());
      break;
    }
    if (!argument.starts_with("--")) {
      // The parser would cut a word in brackets at its commas; the reader of lists does not mind
      // the space.
      out.push_back(argument.starts_with('[') ? " " + argument : argument);
      continue;
    }
    const auto equals = argument.find('=');
    const std::string flag = argument.substr(0, equals), name = flag.substr(2);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals);
    const bool has_next = i + 1 < arguments.size();
    if (std::find(own_flags().begin(), own_flags().end(), flag) != own_flags().end()) {
      if (takes_value(flag) && value.empty()) require_value(arguments, i);
      out.push_back(argument);
    } else if (const Key* key = key_of_flag(name)) {
      const bool bare_switch = key->type() == ValueType::boolean && value.empty();
      if (!bare_switch && value.empty()) require_value(arguments, i);
      const bool next_is_value =
          bare_switch && has_next && (arguments[i + 1] == "true" || arguments[i + 1] == "false");
      const std::string switched = next_is_value ? "=" + arguments[++i] : "=true";
      out.push_back(flag_of(key->name) + (bare_switch ? switched : value));
    } else if (graft_schema().table_holding(name)) {
      if (value.empty()) require_value(arguments, i);
      out.push_back(plugin_option);
      out.push_back(name + (value.empty() ? "=" + arguments[++i] : value));
    } else {
      fail_unknown_flag(flag);
    }
  }
  return out;
}

// A list's name is that of one item: the help puts dots behind it.
std::string value_name(const Key& key) {
  if (!key.placeholder.empty()) return key.placeholder;
  switch (key.type()) {
    case ValueType::boolean:
      return "BOOL";
    case ValueType::integer:
    case ValueType::integers:
      return "INT";
    case ValueType::number:
    case ValueType::numbers:
      return "NUMBER";
    default:
      return "TEXT";
  }
}

// As one would type it.
std::string default_text(const Key& key) {
  if (const auto* text = std::get_if<std::string>(&key.default_value)) return *text;
  if (const auto* list = std::get_if<std::vector<std::string>>(&key.default_value)) {
    return list->empty() ? "" : list->front();
  }
  const std::string text = to_toml(key.default_value);
  return text.starts_with('[') ? text.substr(1, text.size() - 2) : text;
}

std::string help_group(const Key& key) {
  const std::string table = key.name.substr(0, key.name.find('.'));
  if (table == "calibrate") return "Calibration of the converted layers";
  if (table == "eval" || table == "agreement") return "Evaluation";
  if (table == "generate") return "hostapp generate";
  if (table == "select") return "hostapp select-layers";
  if (table == "needle" || table == "speed") return "hostapp compare";
  return "The job";
}

std::string help_line(const Key& key) {
  std::string line = key.doc;
  if (!key.one_of.empty()) {
    std::string choices;
    for (const std::string& choice : key.one_of) choices += (choices.empty() ? "" : "|") + choice;
    line += " (" + choices + ")";
  }
  const std::string value = default_text(key);
  return value.empty() ? line : line + " [" + value + "]";
}

std::string without_space_before_bracket(const std::string& word) {
  return word.starts_with(" [") ? word.substr(1) : word;
}

class Parser {
 public:
  Parser()
      : app_(
            "Turns a softmax-attention transformer into a linear-recurrent student.\n\n"
            "  hostapp --mixer NAME --init NAME --teacher DIR --text FILE... --out DIR\n"
            "  hostapp train RECIPE.toml --teacher DIR --text FILE... --out DIR [--resume]\n"
            "  hostapp eval MODEL --text FILE...\n"
            "  hostapp generate MODEL --prompt TEXT\n"
            "  hostapp inspect MODEL\n"
            "  hostapp report RUN\n"
            "  hostapp select-layers --policy NAME --keep K --teacher DIR --text FILE... --out "
            "FILE\n"
            "  hostapp compare TEACHER STUDENT... --text FILE... [--out FILE]\n"
            "  hostapp plugins list | info NAME\n"
            "  hostapp plugins new KIND NAME DIR [--id-prefix org.example]\n"
            "  hostapp plugins validate FILE [ARGS of graft-validate...]",
            "hostapp") {
    app_.set_help_flag();
    app_.fallthrough();
    add_own_flags();
    for (const Key& key : graft_schema().keys) add_key(key);
    add_commands();
  }

  CommandLine parse(const std::vector<std::string>& arguments) {
    std::vector<std::string> reversed = in_one_spelling(arguments);
    std::reverse(reversed.begin(), reversed.end());
    try {
      app_.parse(reversed);
    } catch (const CLI::ParseError& error) {
      fail(ErrorKind::usage, std::string(error.what()) + "; hostapp --help says how");
    }
    return result();
  }

 private:
  void add_own_flags() {
    app_.add_option("--config", line_.config_files,
                    "a TOML file with any of these keys; repeatable")
        ->type_name("FILE")
        ->allow_extra_args(false);
    app_.add_option("--set", sets_,
                    "any key, those of plugins included: --set mixer.options.rope=true")
        ->type_name("KEY=VALUE")
        ->allow_extra_args(false);
    app_.add_option(plugin_option, plugin_options_)->group("")->allow_extra_args(false);
    app_.add_flag("--print-config", line_.print_config,
                  "print every effective value and where it came from, as TOML, and stop");
    app_.add_flag("--resume", line_.resume, "train: go on with the run in the out folder");
    app_.add_flag("--allow-change", line_.allow_change,
                  "train: resume although recipe, text, teacher or plugins changed");
    app_.add_option("--student", student_, "train: a student of the teacher's to go on from")
        ->type_name("DIR")
        ->allow_extra_args(false);
    app_.add_option("--id-prefix", line_.id_prefix,
                    "plugins new: what the ids begin with, a domain of yours from its end "
                    "[org.example]")
        ->type_name("TEXT")
        ->allow_extra_args(false);
    app_.add_flag("-h,--help", line_.help,
                  "print this, and the options of the plugins that are named");
    app_.add_flag("--version", line_.version, "print the version");
    app_.add_flag("-v,--verbose", line_.verbose, "say more; twice: everything");
    app_.add_flag("-q,--quiet", line_.quiet, "say nothing but warnings and results");
  }

  void add_key(const Key& key) {
    std::vector<std::string>& words = words_[key.name];
    CLI::Option* option = app_.add_option(flag_of(key.name), words, help_line(key));
    option->type_name(value_name(key))->group(help_group(key));
    if (!is_list(key.type())) {
      option->expected(1)->allow_extra_args(false)->multi_option_policy(
          CLI::MultiOptionPolicy::TakeLast);
    }
  }

  CLI::App* add_command(CLI::App& parent, const std::string& name, const std::string& doc,
                        const std::string& subject, Command command) {
    CLI::App* app = parent.add_subcommand(name, doc);
    app->set_help_flag();
    app->fallthrough();
    if (!subject.empty()) app->add_option(subject, line_.subject, "")->type_name("");
    app->callback([this, command] { line_.command = command; });
    return app;
  }

  void add_commands() {
    add_command(app_, "train", "all stages of a recipe, with checkpoints", "RECIPE",
                Command::train);
    add_command(app_, "eval", "perplexity of a teacher or student on a text", "MODEL",
                Command::eval);
    add_command(app_, "generate", "text from a teacher or student", "MODEL", Command::generate);
    add_command(app_, "inspect", "what a model folder holds", "MODEL", Command::inspect);
    add_command(app_, "report", "a training run's curves as one HTML page", "RUN", Command::report);
    add_command(app_, "select-layers", "which layers keep their attention, as a file", "",
                Command::select_layers);
    add_command(app_, "compare", "what students keep of their teacher", "TEACHER", Command::compare)
        ->add_option("STUDENT", line_.students, "")
        ->type_name("");
    plugins_ = app_.add_subcommand(
        "plugins",
        "list | info NAME: the plugins there are; new KIND NAME DIR, validate FILE: your own");
    plugins_->set_help_flag();
    plugins_->fallthrough();
    add_command(*plugins_, "list", "all plugins, and the files that were refused", "",
                Command::plugins_list);
    add_command(*plugins_, "info", "one plugin and its options", "NAME", Command::plugins_info);
    CLI::App* const made = add_command(*plugins_, "new", "a plugin to start from, as a folder",
                                       "KIND", Command::plugins_new);
    made->add_option("NAME", line_.new_name, "")->type_name("");
    made->add_option("DIR", line_.new_folder, "")->type_name("");
    add_command(*plugins_, "validate", "graft-validate on one plugin", "",
                Command::plugins_validate);
  }

  void add_assignment(const std::string& text, const std::string& before_key) {
    const auto equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      fail(ErrorKind::usage, "--set " + text + ": expected KEY=VALUE");
    }
    const std::string key = text.substr(0, equals);
    line_.flags.push_back({key, {text.substr(equals + 1)}, before_key + key});
  }

  CommandLine result() {
    for (const Key& key : graft_schema().keys) {
      std::vector<std::string>& words = words_[key.name];
      if (words.empty()) continue;
      std::transform(words.begin(), words.end(), words.begin(), without_space_before_bracket);
      line_.flags.push_back({key.name, words, flag_of(key.name)});
    }
    for (const std::string& set : sets_) add_assignment(set, "--set ");
    if (!student_.empty()) line_.flags.push_back({"student", {student_}, "--student"});
    for (const std::string& option : plugin_options_) add_assignment(option, "--");
    line_.help_text = app_.help();
    if (line_.help || line_.version) return line_;
    if ((line_.resume || line_.allow_change) && line_.command != Command::train) {
      fail(ErrorKind::usage, std::string(line_.resume ? "--resume" : "--allow-change") +
                                 " is for hostapp train RECIPE");
    }
    if (!student_.empty() && line_.command != Command::train)
      fail(ErrorKind::usage, "--student is for hostapp train RECIPE");
    if (plugins_->parsed() && plugins_->get_subcommands().empty()) {
      fail(ErrorKind::usage,
           "hostapp plugins: list, info NAME, new KIND NAME DIR or validate FILE?");
    }
    check_authors_commands();
    const bool wants_subject =
        line_.command != Command::convert && line_.command != Command::select_layers &&
        line_.command != Command::plugins_list && line_.command != Command::plugins_new;
    if (wants_subject && line_.subject.empty()) {
      const auto* command =
          plugins_->parsed() ? plugins_->get_subcommands().front() : app_.get_subcommands().front();
      fail(
          ErrorKind::usage,
          "hostapp " + std::string(plugins_->parsed() ? "plugins " : "") + command->get_name() +
              ": the " + subject_name() +
              " is missing; it stands before the flags: a flag that takes a list would swallow it");
    }
    if (line_.command == Command::compare && line_.students.empty()) {
      fail(ErrorKind::usage,
           "hostapp compare: which STUDENT folders? They stand behind the TEACHER and before the "
           "flags");
    }
    return line_;
  }

  void check_authors_commands() const {
    if (!line_.id_prefix.empty() && line_.command != Command::plugins_new)
      fail(ErrorKind::usage, "--id-prefix is for hostapp plugins new KIND NAME DIR");
    if (line_.command == Command::plugins_new && line_.new_folder.empty()) {
      fail(ErrorKind::usage,
           "hostapp plugins new: expected KIND NAME DIR, as in: hostapp plugins new mixer my_mixer "
           "my_mixer (KIND: mixer, mixer-c, initializer or objective)");
    }
    // What stands behind it is not for this parser: see parse_command_line().
    if (line_.command == Command::plugins_validate)
      fail(ErrorKind::usage,
           "hostapp plugins validate FILE [ARGS...]: nothing may stand before it");
  }

  const char* subject_name() const {
    if (line_.command == Command::plugins_info) return "NAME";
    if (line_.command == Command::compare) return "TEACHER folder";
    if (line_.command == Command::report) return "RUN folder";
    return line_.command == Command::train ? "RECIPE file" : "MODEL folder";
  }

  CLI::App app_;
  CLI::App* plugins_ = nullptr;
  CommandLine line_;
  std::map<std::string, std::vector<std::string>> words_;
  std::vector<std::string> sets_, plugin_options_;
  std::string student_;
};

}  // namespace

std::string flag_of(const std::string& key) {
  const Key* known = graft_schema().find_key(key);
  if (known && !known->flag.empty()) return known->flag;
  std::string name = key;
  if (name.find('.') == std::string::npos) std::replace(name.begin(), name.end(), '_', '-');
  return "--" + name;
}

CommandLine parse_command_line(const std::vector<std::string>& arguments) {
  if (arguments.size() >= 2 && arguments[0] == "plugins" && arguments[1] == "validate") {
    CommandLine line;
    line.command = Command::plugins_validate;
    line.passed_on = {arguments.begin() + 2, arguments.end()};
    return line;
  }
  return Parser().parse(arguments);
}

}  // namespace graft
