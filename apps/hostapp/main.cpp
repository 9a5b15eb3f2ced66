// The command line: hostapp.
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <malloc.h>

#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "apps/hostapp/command_line.h"
#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/failure.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/new_plugin.h"
#include "apps/hostapp/plugins_command.h"
#include "apps/hostapp/settings.h"
#include "apps/hostapp/train_settings.h"
#include "core/abi/host_services.h"
#include "core/base/error.h"
#include "core/loader/registry.h"
#include "core/report/html_report.h"
#include "core/student/torch_abi.h"
#include "graft/version.h"

namespace graft {

void set_threads(std::int64_t threads) {
  if (threads > 0) at::set_num_threads(static_cast<int>(threads));
}

namespace {

HostServices::Settings host_settings() {
  HostServices::Settings settings = torch_host_settings();
  settings.name = "hostapp";
  settings.should_stop = interrupted;
  return settings;
}

// The configuration with recipe and plugins' defaults, as far as the plugins are named.
std::string effective_configuration(Config config, PluginRegistry& registry) {
  add_recipe(config, registry);
  add_all_plugin_defaults(config, registry);
  return config.to_toml();
}

// Help must not fail because of a plugin that is not there: then it says so below.
std::string help(const CommandLine& line, Config config, PluginRegistry& registry) {
  std::string text = line.help_text + "\n";
  try {
    add_recipe(config, registry);
    const std::string plugins = help_on_plugins(config, registry);
    text += plugins.empty()
                ? "With --mixer and --init, the options of those plugins are listed here too.\n"
                : plugins;
  } catch (const Error& error) {
    text += std::string("(options of plugins: ") + error.what() + ")\n";
  }
  return text;
}

// The folder of the LibTorch in this process; "" when the linker does not tell.
std::filesystem::path libtorch_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&at::set_num_threads), &info) == 0) return {};
  return std::filesystem::path(info.dli_fname).parent_path().parent_path();
}

std::string make_new_plugin(const CommandLine& line) {
  NewPlugin wanted{line.subject, line.new_name, line.new_folder};
  if (!line.id_prefix.empty()) wanted.id_prefix = line.id_prefix;
  return new_plugin(wanted, {executable_folder().parent_path(), libtorch_folder()});
}

void run(const CommandLine& line) {
  if (line.command == Command::plugins_validate)
    run_validator(executable_folder() / "graft-validate", line.passed_on);
  if (line.version) {
    std::cout << "hostapp " GRAFT_VERSION_STRING ", plugin ABI "
              << GRAFT_ABI_MAJOR(GRAFT_ABI_CURRENT) << "." << GRAFT_ABI_MINOR(GRAFT_ABI_CURRENT)
              << ", " << host_build_tags() << "\n";
    return;
  }
  Console console(line.quiet ? -1 : line.verbose);
  catch_interrupts();
  const bool trains = line.command == Command::train && !line.help;
  const Config config = trains ? read_train_configuration(line) : read_configuration(line);
  set_threads(config.get<std::int64_t>("threads"));
  HostServices host(host_settings());
  const auto registry = make_registry(config, host);

  if (line.help) {
    std::cout << help(line, config, *registry);
  } else if (line.print_config) {
    std::cout << (trains ? resolved_train_configuration(config, *registry).to_toml()
                         : effective_configuration(config, *registry));
  } else {
    switch (line.command) {
      case Command::convert:
        run_convert(line, config, *registry, console);
        break;
      case Command::train:
        run_train(line, config, *registry, console);
        break;
      case Command::eval:
        run_eval(line.subject, config, *registry, console);
        break;
      case Command::generate:
        run_generate(line.subject, config, *registry);
        break;
      case Command::inspect:
        run_inspect(line.subject, line.verbose > 0);
        break;
      case Command::report:
        write_report(line.subject);
        std::cout << "report: " << line.subject << "/report.html\n";
        break;
      case Command::select_layers:
        run_select_layers(config, *registry, console);
        break;
      case Command::compare:
        run_compare(line, config, *registry, console);
        break;
      case Command::plugins_list:
        std::cout << list_plugins(*registry);
        break;
      case Command::plugins_info:
        std::cout << plugin_info(*registry, line.subject);
        break;
      case Command::plugins_new:
        std::cout << make_new_plugin(line);
        break;
      case Command::plugins_validate:
        break;  // never comes back
    }
  }
}

// Activations of the same few sizes come and go all the time: handing their pages back to the
// system, to have them cleared at the next touch, takes more time than some of the arithmetic.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

int report(const std::string& message, int exit_code) {
  std::cerr << "hostapp: error: " << message << std::endl;
  return exit_code;
}

}  // namespace
}  // namespace graft

int main(int argc, char** argv) {
  using namespace graft;
  keep_freed_memory();
  try {
    run(parse_command_line({argv + 1, argv + argc}));
    std::cout.flush();
    if (!std::cout)
      return report("cannot write to standard output", static_cast<int>(ErrorKind::internal));
    return 0;
  } catch (const Error& error) {
    std::cout.flush();
    return report(error.what(), error.exit_code());
  } catch (const std::bad_alloc&) {
    return report("out of memory", static_cast<int>(ErrorKind::internal));
  } catch (const std::exception& error) {
    return report(describe_failure(error.what()), static_cast<int>(ErrorKind::internal));
  } catch (...) {
    return report("unexpected, of unknown kind", static_cast<int>(ErrorKind::internal));
  }
}
