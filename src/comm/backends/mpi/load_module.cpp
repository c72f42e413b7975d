#include "comm/backends/mpi/load_module.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/version.h"

namespace lockstep::comm::mpi {
namespace {

constexpr const char* kFile = "liblockstep_mpi.so";

[[noreturn]] void fail(const std::string& reason) {
  throw InvalidArgument("backend \"mpi\" cannot be loaded: " + reason,
                        {.operation = "init_process_group", .backend = "mpi"});
}

/// The file to open: a path, or a name for the loader to look for.
std::string find_file() {
  Dl_info own{};
  if (::dladdr(reinterpret_cast<void*>(&load_module), &own) == 0) return kFile;
  std::error_code ignored;
  const auto beside =
      std::filesystem::canonical(own.dli_fname, ignored).parent_path() / kFile;
  return std::filesystem::exists(beside, ignored) ? beside.string() : kFile;
}

Module& load() {
  // Open MPI's own modules may look for its symbols among the global ones.
  void* const handle = ::dlopen(find_file().c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    fail(std::string(::dlerror()) + "; install MPI's libraries and keep " +
         kFile +
         " beside liblockstep.so, or build with -DLOCKSTEP_WITH_MPI=ON where "
         "MPI is");
  }
  auto* const get = reinterpret_cast<GetModule*>(::dlsym(handle, kGetModule));
  Module* const module = get == nullptr ? nullptr : get(LOCKSTEP_VERSION);
  if (module == nullptr) {
    fail(std::string(kFile) + " is not of Lockstep " + LOCKSTEP_VERSION +
         "; install both from one build");
  }
  return *module;
}

}  // namespace

Module& load_module() {
  static Module& module = load();
  return module;
}

}  // namespace lockstep::comm::mpi
