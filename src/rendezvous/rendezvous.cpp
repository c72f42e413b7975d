#include "rendezvous/rendezvous.h"

#include <c10/util/Exception.h>

#include <fcntl.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/clock.h"
#include "core/env.h"
#include "core/fd.h"
#include "launch/cluster_environment.h"
#include "lockstep/core/error.h"
#include "lockstep/core/log.h"
#include "rendezvous/address.h"
#include "rendezvous/bounded_store.h"
#include "rendezvous/call_thread.h"
#include "rendezvous/common_address.h"
#include "rendezvous/job_socket.h"
#include "rendezvous/open_stores.h"
#include "rendezvous/url.h"

namespace lockstep::rendezvous {
namespace {

using launcher::ClusterEnvironment;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

[[noreturn]] void fail(const std::string& message) {
  throw InvalidArgument(message, {.operation = "init_process_group"});
}

/// A setting that may come from several places: all must agree.
class Setting {
 public:
  explicit Setting(const char* name) : name_(name) {}

  void take(std::optional<int> value, const std::string& source) {
    if (!value) return;
    if (value_ && *value_ != *value) {
      fail(std::string(name_) + " is " + std::to_string(*value_) + " by " +
           source_ + " but " + std::to_string(*value) + " by " + source +
           "; make them agree or leave one out");
    }
    if (!value_) source_ = source;
    value_ = value;
  }

  [[nodiscard]] std::optional<int> value() const { return value_; }

 private:
  const char* name_;
  std::optional<int> value_;
  std::string source_;
};

std::string joined_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

/// The process's place as all sources together tell it.
struct Place {
  Url url;
  ClusterEnvironment environment;
  std::optional<Assigned> assigned;
  std::optional<int> rank;
  std::optional<int> world_size;

  [[nodiscard]] bool by_env() const { return url.scheme == Url::Scheme::Env; }
  /// Nothing says where rank 0 is.
  [[nodiscard]] bool without_address() const {
    return by_env() && !environment.master_addr && !environment.master_port;
  }
  /// Ranks that can talk through their backend.
  [[nodiscard]] bool meets_by_backend() const {
    return without_address() && assigned;
  }
  /// Ranks that share nothing but the job's name.
  [[nodiscard]] bool meets_by_job() const {
    return without_address() && !assigned && !environment.job.empty();
  }
};

Place find_place(const InitOptions& options,
                 const std::optional<Assigned>& assigned) {
  Place place;
  place.assigned = assigned;
  place.url =
      parse_url(options.init_method.empty() ? "env://" : options.init_method);
  place.environment = launcher::read_cluster_environment();
  log::debug("the environment's ranks come from: " + place.environment.source);
  Setting rank("rank");
  Setting world_size("world_size");
  rank.take(options.rank, "argument");
  rank.take(place.url.rank, "init_method");
  rank.take(place.environment.rank, place.environment.source);
  world_size.take(options.world_size, "argument");
  world_size.take(place.url.world_size, "init_method");
  world_size.take(place.environment.world_size, place.environment.source);
  if (assigned) {
    rank.take(assigned->rank, assigned->source);
    world_size.take(assigned->world_size, assigned->source);
  }
  place.rank = rank.value();
  place.world_size = world_size.value();
  return place;
}

/// Completes a world of one, names all that is missing, refuses a rank outside
/// its world.
void check_place(Place& place) {
  const auto& environment = place.environment;
  if (!place.rank && !place.world_size) {
    if (place.by_env() &&
        (environment.master_addr || environment.master_port)) {
      log::warning(
          "MASTER_ADDR or MASTER_PORT is set but RANK and WORLD_SIZE are not: "
          "running as a world of one");
    }
    if (place.by_env()) {
      place.rank = 0;
      place.world_size = 1;
    }
  }
  std::vector<std::string> missing;
  if (!place.rank) missing.emplace_back("RANK");
  if (!place.world_size) missing.emplace_back("WORLD_SIZE");
  if (place.by_env() && place.world_size.value_or(2) > 1 &&
      !place.meets_by_job() && !place.meets_by_backend()) {
    if (!environment.master_addr) missing.emplace_back("MASTER_ADDR");
    if (!environment.master_port) missing.emplace_back("MASTER_PORT");
  }
  if (!missing.empty()) {
    fail(joined_names(missing) +
         (missing.size() == 1 ? " is not set" : " are not set") +
         " (ranks come from: " + environment.source +
         "); start the program with `lockstep run --nproc-per-node N`, "
         "torchrun, mpirun or srun, or set them; with none of RANK and "
         "WORLD_SIZE it runs alone");
  }
  if (*place.world_size < 1) {
    fail("world_size is " + std::to_string(*place.world_size) +
         "; it must be 1 or more");
  }
  if (*place.rank < 0 || *place.rank >= *place.world_size) {
    fail("rank " + std::to_string(*place.rank) + " is outside a world of " +
         std::to_string(*place.world_size) +
         "; ranks count from 0 to the world size minus one");
  }
  if (*place.world_size > 1 && place.meets_by_job() &&
      environment.several_hosts) {
    fail(
        "the job runs on several hosts and MASTER_ADDR and MASTER_PORT are "
        "not set; set them to a host and a free port of rank 0");
  }
}

/// Makes one store, or hands out the one that was made before.
class StoreMaker {
 public:
  StoreMaker(const Place& place,
             std::chrono::milliseconds timeout,
             const Deadline& deadline,
             bool interop)
      : place_(place),
        timeout_(timeout),
        deadline_(deadline),
        interop_(interop),
        rank_(*place.rank),
        world_size_(*place.world_size),
        agent_serves_(place.by_env() &&
                      env::get("TORCHELASTIC_USE_AGENT_STORE") == "True") {}

  [[nodiscard]] bool hosts_store() const {
    return place_.url.scheme != Url::Scheme::File && rank_ == 0 &&
           !agent_serves_;
  }

  StorePtr run() {
    // c10d's keys are the same for each group, so a store that Python ranks
    // share cannot serve twice.
    if (interop_) return make();
    if (auto store = find_store(name())) return store;
    auto store = make();
    keep_store(name(), store);
    return store;
  }

  /// What the store is kept by; empty: it is not kept.
  [[nodiscard]] std::string name() const {
    if (interop_) return {};
    const std::string own = "#" + std::to_string(rank_);
    if (place_.url.scheme == Url::Scheme::File) return place_.url.path + own;
    if (place_.meets_by_job()) return place_.environment.job + own;
    if (place_.meets_by_backend()) return place_.assigned->source + own;
    return to_string(host(), port()) + own;
  }

 private:
  [[nodiscard]] const std::string& host() const {
    return place_.by_env() ? *place_.environment.master_addr : place_.url.host;
  }
  [[nodiscard]] uint16_t port() const {
    return place_.by_env()
               ? static_cast<uint16_t>(*place_.environment.master_port)
               : place_.url.port;
  }

  StorePtr make() {
    if (place_.url.scheme == Url::Scheme::File) return make_file_store();
    if (place_.meets_by_backend()) {
      auto [endpoint, listener] =
          find_common_address(*place_.assigned, deadline_);
      return rank_ == 0 ? serve_tcp_store(std::move(listener))
                        : join_tcp_store(endpoint.host, endpoint.port);
    }
    if (place_.meets_by_job()) {
      if (rank_ != 0) {
        return join_tcp_store(
            "127.0.0.1",
            ask_for_port(place_.environment.job, rank_, deadline_));
      }
      Fd fd = bind_to("127.0.0.1", 0, deadline_);
      const uint16_t port = bound_endpoint(fd.get()).port;
      auto store = serve_tcp_store(std::move(fd));
      hand_out_port(place_.environment.job, world_size_, port, deadline_);
      return store;
    }
    auto store = hosts_store() ? serve_tcp_store(master_socket())
                               : join_tcp_store(host(), port());
    const auto restarts = env::get_int("TORCHELASTIC_RESTART_COUNT", 0);
    if (!interop_ && restarts.value_or(0) != 0) {
      // The agent's store may still hold the keys of the attempt before.
      store = c10::make_intrusive<c10d::PrefixStore>(
          "/worker/attempt_" + std::to_string(*restarts), store);
    }
    return store;
  }

  /// The socket to serve at: the one that the starter reserved and passed on,
  /// else a new one.
  Fd master_socket() {
    const auto inherited = env::get_int("LOCKSTEP_MASTER_FD", 0, INT_MAX);
    ::unsetenv("LOCKSTEP_MASTER_FD");
    if (inherited) {
      const int fd = static_cast<int>(*inherited);
      if (bound_endpoint(fd).port == port()) {
        ::fcntl(fd, F_SETFD, FD_CLOEXEC);
        return Fd(fd);
      }
      log::debug("LOCKSTEP_MASTER_FD is not bound to MASTER_PORT: not used");
    }
    return bind_to(host(), port(), deadline_);
  }

  StorePtr serve_tcp_store(Fd fd) {
    const Endpoint endpoint = bound_endpoint(fd.get());
    c10d::TCPStoreOptions options;
    options.port = endpoint.port;
    options.isServer = true;
    options.numWorkers = world_size_;
    options.waitWorkers = false;
    options.timeout = timeout_;
    options.masterListenFd = fd.release();
    return tcp_store(endpoint.host, options);
  }

  StorePtr join_tcp_store(const std::string& host, uint16_t port) {
    const Endpoint endpoint = find_listener(host, port, deadline_);
    c10d::TCPStoreOptions options;
    options.port = endpoint.port;
    options.numWorkers = world_size_;
    // Python's rank 0 counts the ranks that have come.
    options.waitWorkers = interop_;
    options.timeout =
        std::max(deadline_.remaining(), std::chrono::milliseconds(1));
    return tcp_store(endpoint.host, options);
  }

  StorePtr tcp_store(const std::string& host,
                     const c10d::TCPStoreOptions& options) {
    const ErrorContext context = {.operation = "init_process_group",
                                  .rank = rank_,
                                  .world_size = world_size_};
    const auto where = "the store at " + to_string(host, options.port);
    CallThread thread;
    auto store = thread.run(
        [host, options] {
          return c10::make_intrusive<c10d::TCPStore>(host, options);
        },
        deadline_);
    if (!store.valid()) throw silent_store(where, deadline_, context);
    try {
      auto made = store.get();
      made->setTimeout(timeout_);
      return made;
    } catch (const c10::Error& e) {
      throw StoreError(where + " failed: " + e.what_without_backtrace(),
                       context);
    }
  }

  StorePtr make_file_store() {
    const std::filesystem::path path = place_.url.path;
    std::error_code ignored;
    if (!std::filesystem::is_directory(path.parent_path(), ignored)) {
      throw StoreError("the folder of " + place_.url.path +
                           " does not exist; create it or correct init_method",
                       {.operation = "init_process_group",
                        .rank = rank_,
                        .world_size = world_size_});
    }
    auto store =
        c10::make_intrusive<c10d::FileStore>(place_.url.path, world_size_);
    store->setTimeout(timeout_);
    return store;
  }

  const Place& place_;
  std::chrono::milliseconds timeout_;
  Deadline deadline_;
  bool interop_;
  int rank_;
  int world_size_;
  bool agent_serves_;
};

}  // namespace

Joined join(const InitOptions& options,
            bool interop,
            const Deadline& deadline,
            const std::optional<Assigned>& assigned) {
  Place place = find_place(options, assigned);
  check_place(place);
  Joined joined;
  joined.rank = *place.rank;
  joined.world_size = *place.world_size;
  joined.local_rank = place.environment.local_rank;
  joined.local_world_size = place.environment.local_world_size;
  if (joined.world_size == 1) {
    joined.store = c10::make_intrusive<c10d::HashStore>();
    return joined;
  }
  StoreMaker maker(place, options.timeout, deadline, interop);
  joined.hosts_store = maker.hosts_store();
  joined.place = maker.name();
  joined.store = maker.run();
  return joined;
}

}  // namespace lockstep::rendezvous
