#include "comm/backends/mpi/module/module.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "comm/backends/mpi/module/environment.h"
#include "comm/backends/mpi/module/messages.h"
#include "lockstep/version.h"

namespace lockstep::comm::mpi {
namespace {

class MpiBackend final : public c10d::Backend {
 public:
  explicit MpiBackend(const Members& members)
      : Backend(members.rank, static_cast<int>(members.world_ranks.size())),
        messages_(std::make_shared<Messages>(members)) {}

  ~MpiBackend() override { messages_->close(members_are_done_); }

  /// All members are done.
  void shutdown() override { members_are_done_ = true; }

  const std::string getBackendName() const override { return "mpi"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors,
                                      int dst,
                                      int tag) override {
    return post(c10d::OpType::SEND, tensors, dst, tag);
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors,
                                      int src,
                                      int tag) override {
    return post(c10d::OpType::RECV, tensors, src, tag);
  }

  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors,
                                               int tag) override {
    return post(c10d::OpType::RECVANYSOURCE, tensors, MPI_ANY_SOURCE, tag);
  }

 private:
  c10::intrusive_ptr<c10d::Work> post(c10d::OpType type,
                                      const std::vector<at::Tensor>& tensors,
                                      int peer,
                                      int tag) {
    auto message =
        c10::make_intrusive<Message>(type, tensors.at(0), peer, tag, messages_);
    messages_->post(message);
    return message;
  }

  const std::shared_ptr<Messages> messages_;
  bool members_are_done_ = false;
};

class ThisModule final : public Module {
 public:
  World start() override { return mpi::start(); }

  std::vector<std::string> exchange(const std::string& text) override {
    return mpi::exchange(text);
  }

  c10::intrusive_ptr<c10d::Backend> connect(const Members& members) override {
    return c10::make_intrusive<MpiBackend>(members);
  }

  void give_up() noexcept override { mpi::give_up(); }
};

}  // namespace

extern "C" [[gnu::visibility("default")]] Module* lockstep_mpi_module(
    const char* version) {
  static ThisModule module;
  return std::strcmp(version, LOCKSTEP_VERSION) == 0 ? &module : nullptr;
}

}  // namespace lockstep::comm::mpi
