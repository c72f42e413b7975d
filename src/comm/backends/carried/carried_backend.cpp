#include "comm/backends/carried/carried_backend.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <numeric>
#include <thread>

#include "comm/backends/carried/algorithms.h"
#include "comm/backends/carried/hierarchy.h"
#include "comm/backends/carried/messenger.h"
#include "comm/backends/carried/transport.h"
#include "comm/backends/carried/work.h"
#include "comm/fingerprint.h"
#include "comm/first_failure.h"
#include "comm/kernels/reduce.h"
#include "comm/liveness.h"
#include "comm/p2p/message_backend.h"
#include "comm/splits.h"
#include "core/block_sigpipe.h"
#include "core/clock.h"
#include "core/env.h"
#include "lockstep/core/error.h"

namespace lockstep::comm::carried {
namespace {

using namespace std::chrono_literals;

// How long a peer that is alive may take to say how far it has come.
constexpr std::chrono::milliseconds kAnswerTime = 500ms;

std::string list_of(const std::vector<int>& ranks) {
  if (ranks.empty()) return "the other ranks";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

class CarriedBackend final : public p2p::MessageBackend {
 public:
  CarriedBackend(std::string name,
                 const BackendContext& context,
                 c10::intrusive_ptr<c10d::Backend> carrier,
                 bool exact_sizes,
                 std::shared_ptr<const Hosts> hosts)
      : MessageBackend(context.rank, context.world_size),
        name_(std::move(name)),
        context_(context),
        check_(env::get_bool("LOCKSTEP_CHECK").value_or(true)),
        timeout_(context.timeout),
        failure_(std::make_shared<FirstFailure>()),
        messenger_(std::make_shared<CarriedMessenger>(
            carrier, context.liveness, failure_, exact_sizes)),
        transport_(std::move(carrier)),
        algorithms_(make_algorithms(std::move(hosts))),
        worker_([this] { work_off_queue(); }) {
    if (context_.liveness) {
      subscription_ =
          context_.liveness->subscribe([this] { transport_.interrupt(); });
    }
  }

  ~CarriedBackend() override { stop(); }

  const std::string getBackendName() const override { return name_; }

  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_.store(timeout);
  }

  /// Lets the queued operations end, takes leave of the peers, closes.
  void shutdown() override { stop(); }

  /// Ends everything pending with BackendError. From any thread.
  void abort() override {
    aborted_.store(true);
    transport_.interrupt();
    messenger_->abort("the group was aborted");
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& opts) override {
    const at::Tensor tensor = only(tensors);
    const auto call =
        of_reduction(Operation::kAllReduce, tensor, opts.reduceOp);
    return submit(c10d::OpType::ALLREDUCE,
                  call,
                  {tensor},
                  opts.timeout,
                  [this, tensor, call](const Deadline& deadline) {
                    algorithms_->all_reduce(Bytes(tensor), call, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& opts) override {
    const at::Tensor tensor = only(tensors);
    const int root = static_cast<int>(opts.rootRank);
    auto call = of_tensor(Operation::kBroadcast, tensor);
    call.root = root;
    return submit(c10d::OpType::BROADCAST,
                  call,
                  {tensor},
                  opts.timeout,
                  [this, tensor, root](const Deadline& deadline) {
                    algorithms_->broadcast(Bytes(tensor), root, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override {
    const at::Tensor input = only(inputs);
    const auto list = one_per_rank(outputs, input);
    return submit(c10d::OpType::ALLGATHER,
                  of_tensor(Operation::kAllGather, input),
                  list,
                  opts.timeout,
                  [this, list, input](const Deadline& deadline) {
                    algorithms_->all_gather(
                        parts_of(list), Bytes(input), deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output_tensor,
      at::Tensor& input_tensor,
      const c10d::AllgatherOptions& opts) override {
    const at::Tensor output = output_tensor;
    const at::Tensor input = input_tensor;
    check_whole(output, input);
    return submit(c10d::OpType::_ALLGATHER_BASE,
                  of_tensor(Operation::kAllGather, input),
                  {output},
                  opts.timeout,
                  [this, output, input](const Deadline& deadline) {
                    algorithms_->all_gather(
                        parts_of(output), Bytes(input), deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor output = only(outputs);
    const auto list = one_per_rank(inputs, output);
    const auto call =
        of_reduction(Operation::kReduceScatter, output, opts.reduceOp);
    return submit(c10d::OpType::REDUCE_SCATTER,
                  call,
                  {output},
                  opts.timeout,
                  [this, list, output, call](const Deadline& deadline) {
                    algorithms_->reduce_scatter(
                        parts_of(list), Bytes(output), call, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output_tensor,
      at::Tensor& input_tensor,
      const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor output = output_tensor;
    const at::Tensor input = input_tensor;
    check_whole(input, output);
    const auto call =
        of_reduction(Operation::kReduceScatter, output, opts.reduceOp);
    return submit(c10d::OpType::_REDUCE_SCATTER_BASE,
                  call,
                  {output},
                  opts.timeout,
                  [this, input, output, call](const Deadline& deadline) {
                    algorithms_->reduce_scatter(
                        parts_of(input), Bytes(output), call, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOptions& opts) override {
    const at::Tensor tensor = only(tensors);
    auto call = of_reduction(Operation::kReduce, tensor, opts.reduceOp);
    call.root = root_of(opts.rootRank);
    return submit(c10d::OpType::REDUCE,
                  call,
                  {tensor},
                  opts.timeout,
                  [this, tensor, call](const Deadline& deadline) {
                    algorithms_->reduce(Bytes(tensor), call, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& opts) override {
    const at::Tensor input = only(inputs);
    auto call = of_tensor(Operation::kGather, input);
    call.root = root_of(opts.rootRank);
    std::vector<at::Tensor> list;
    if (opts.rootRank == rank_) list = one_per_rank(outputs, input);
    return submit(c10d::OpType::GATHER,
                  call,
                  list,
                  opts.timeout,
                  [this, list, input, root = static_cast<int>(opts.rootRank)](
                      const Deadline& deadline) {
                    algorithms_->gather(
                        parts_of(list), Bytes(input), root, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& opts) override {
    const at::Tensor output = only(outputs);
    auto call = of_tensor(Operation::kScatter, output);
    call.root = root_of(opts.rootRank);
    std::vector<at::Tensor> list;
    if (opts.rootRank == rank_) list = one_per_rank(inputs, output);
    return submit(c10d::OpType::SCATTER,
                  call,
                  {output},
                  opts.timeout,
                  [this, list, output, root = static_cast<int>(opts.rootRank)](
                      const Deadline& deadline) {
                    algorithms_->scatter(
                        parts_of(list), Bytes(output), root, deadline);
                  });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output_tensor,
      at::Tensor& input_tensor,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    check_tensor(output_tensor);
    check_tensor(input_tensor);
    check_splits("output_split_sizes", output_splits, output_tensor);
    check_splits("input_split_sizes", input_splits, input_tensor);
    return exchange_all(c10d::OpType::ALLTOALL_BASE,
                        {output_tensor},
                        {input_tensor},
                        cut(output_tensor, output_splits, size_),
                        cut(input_tensor, input_splits, size_),
                        opts.timeout);
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& opts) override {
    for (const auto* list : {&outputs, &inputs}) {
      if (static_cast<int>(list->size()) != size_) {
        throw InvalidArgument("a list of one tensor for each of the " +
                              std::to_string(size_) + " ranks is needed");
      }
      for (const auto& tensor : *list) check_tensor(tensor);
    }
    return exchange_all(c10d::OpType::ALLTOALL,
                        outputs,
                        inputs,
                        stretches_of_each(outputs),
                        stretches_of_each(inputs),
                        opts.timeout);
  }

  c10::intrusive_ptr<c10d::Work> barrier(
      const c10d::BarrierOptions& opts) override {
    const Fingerprint call = {.operation = Operation::kBarrier};
    return submit(c10d::OpType::BARRIER,
                  call,
                  {},
                  opts.timeout,
                  [this, call](const Deadline& deadline) {
                    if (!check_) algorithms_->compare(call, deadline);
                  });
  }

 protected:
  [[nodiscard]] ErrorContext error_context(
      const char* operation) const override {
    ErrorContext result = context_.error_context(name_);
    result.operation = operation;
    return result;
  }
  [[nodiscard]] std::chrono::milliseconds group_timeout() const override {
    return timeout_.load();
  }
  std::shared_ptr<p2p::Messenger> messenger(
      const ErrorContext& context) override {
    if (failure_->happened()) failure_->refuse(context);
    return messenger_;
  }

 private:
  struct Queued {
    c10::intrusive_ptr<QueuedWork> work;
    Fingerprint fingerprint;
    std::chrono::milliseconds timeout;
    std::function<void(const Deadline&)> body;
  };

  // --- Arguments

  [[nodiscard]] ErrorContext error_context(Operation operation) const {
    return error_context(name(operation));
  }

  [[nodiscard]] int global_rank(int rank) const {
    return context_.liveness ? context_.liveness->global_rank(rank) : rank;
  }

  [[nodiscard]] std::vector<int> global_ranks(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = global_rank(rank);
    return ranks;
  }

  [[nodiscard]] uint32_t root_of(int64_t root) const {
    if (root < 0 || root >= size_) {
      throw InvalidArgument("the root is " + std::to_string(root) +
                            "; ranks are 0 to " + std::to_string(size_ - 1));
    }
    return static_cast<uint32_t>(root);
  }

  void check_splits(const char* name,
                    const std::vector<int64_t>& splits,
                    const at::Tensor& tensor) const {
    const auto wrong = wrong_splits(name, splits, tensor, size_);
    if (wrong) throw InvalidArgument(*wrong);
  }

  static const at::Tensor& only(const std::vector<at::Tensor>& tensors) {
    if (tensors.size() != 1) {
      throw InvalidArgument("one tensor per rank is needed, not " +
                            std::to_string(tensors.size()));
    }
    return tensors[0];
  }

  void check_tensor(const at::Tensor& tensor) const {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided ||
        !tensor.is_contiguous()) {
      throw InvalidArgument("backend " + name_ +
                            " needs contiguous dense tensors on the CPU; call "
                            ".cpu().contiguous()");
    }
  }

  /// `whole` holds a share like `part` for each rank.
  void check_whole(const at::Tensor& whole, const at::Tensor& part) const {
    check_tensor(whole);
    if (whole.scalar_type() != part.scalar_type() ||
        whole.numel() != part.numel() * size_) {
      throw InvalidArgument(
          "the tensor of all ranks must have the other's dtype and " +
          std::to_string(part.numel() * size_) + " elements, not " +
          std::to_string(whole.numel()));
    }
  }

  std::vector<at::Tensor> one_per_rank(
      const std::vector<std::vector<at::Tensor>>& lists,
      const at::Tensor& part) const {
    if (lists.size() != 1 || static_cast<int>(lists[0].size()) != size_) {
      throw InvalidArgument("a list of one tensor for each of the " +
                            std::to_string(size_) + " ranks is needed");
    }
    for (const auto& tensor : lists[0]) {
      check_tensor(tensor);
      if (tensor.scalar_type() != part.scalar_type() ||
          tensor.numel() != part.numel()) {
        throw InvalidArgument(
            "all tensors must have the same dtype and number of elements");
      }
    }
    return lists[0];
  }

  static std::vector<char*> parts_of(const std::vector<at::Tensor>& list) {
    std::vector<char*> parts;
    for (const auto& tensor : list) parts.push_back(Bytes(tensor).data());
    return parts;
  }

  [[nodiscard]] std::vector<char*> parts_of(const at::Tensor& whole) const {
    const Bytes bytes(whole);
    std::vector<char*> parts;
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back(bytes.data() + bytes.begin(rank, size_));
    }
    return parts;
  }

  [[nodiscard]] Fingerprint of_tensor(Operation operation,
                                      const at::Tensor& tensor) const {
    check_tensor(tensor);
    return fingerprint(operation, tensor);
  }

  Fingerprint of_reduction(Operation operation,
                           const at::Tensor& tensor,
                           const c10d::ReduceOp& c10d_op) const {
    check_tensor(tensor);
    const ReduceOp op = to_reduce_op(c10d_op);
    const auto result = fingerprint(operation, tensor, op);
    if (!kernels::can_reduce(op, tensor.scalar_type())) {
      const auto same = [](int rank) { return rank; };
      throw Unsupported(
          describe(result, same) + " is not available for this dtype",
          error_context(operation));
    }
    return result;
  }

  [[nodiscard]] ReduceOp to_reduce_op(const c10d::ReduceOp& op) const {
    switch (op) {
      case c10d::ReduceOp::SUM:
        return ReduceOp::SUM;
      case c10d::ReduceOp::AVG:
        return ReduceOp::AVG;
      case c10d::ReduceOp::PRODUCT:
        return ReduceOp::PRODUCT;
      case c10d::ReduceOp::MIN:
        return ReduceOp::MIN;
      case c10d::ReduceOp::MAX:
        return ReduceOp::MAX;
      default:
        throw Unsupported("backend " + name_ +
                          " reduces with SUM, AVG, PRODUCT, MIN, MAX");
    }
  }

  c10::intrusive_ptr<c10d::Work> exchange_all(
      c10d::OpType type,
      const std::vector<at::Tensor>& outputs,
      const std::vector<at::Tensor>& inputs,
      std::vector<Stretch> receives,
      std::vector<Stretch> sends,
      std::chrono::milliseconds timeout) {
    const auto dtype = inputs[0].scalar_type();
    for (const auto* list : {&outputs, &inputs}) {
      for (const auto& tensor : *list) {
        if (tensor.scalar_type() != dtype) {
          throw InvalidArgument("all tensors must have the same dtype");
        }
      }
    }
    return submit(
        type,
        fingerprint_of_all_to_all(dtype),
        outputs,
        timeout,
        [this,
         inputs,  // kept alive
         sends = std::move(sends),
         receives = std::move(receives),
         element = c10::elementSize(dtype)](const Deadline& deadline) {
          algorithms_->all_to_all(sends, receives, element, deadline);
        });
  }

  // --- Queue

  std::unique_ptr<Algorithms> make_algorithms(
      std::shared_ptr<const Hosts> hosts) {
    const auto give_up = [this] { return given_up(); };
    const auto name_rank = [this](int rank) { return global_rank(rank); };
    std::vector<int> all(static_cast<size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    if (hosts) {
      return std::make_unique<HierarchicalAlgorithms>(transport_,
                                                      std::move(hosts),
                                                      std::move(all),
                                                      rank_,
                                                      give_up,
                                                      name_rank);
    }
    return std::make_unique<Algorithms>(
        transport_, std::move(all), rank_, give_up, name_rank);
  }

  c10::intrusive_ptr<c10d::Work> submit(
      c10d::OpType type,
      const Fingerprint& fingerprint,
      std::vector<at::Tensor> outputs,
      std::chrono::milliseconds timeout,
      std::function<void(const Deadline&)> body) {
    ErrorContext error = error_context(fingerprint.operation);
    if (timeout == c10d::kUnsetTimeout) timeout = timeout_.load();
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      throw InvalidArgument(
          "the group was destroyed; call init_process_group again", error);
    }
    if (failure_->happened()) failure_->refuse(error);
    error.sequence = ++sequence_;
    auto work = c10::make_intrusive<QueuedWork>(
        type, std::move(outputs), std::move(error));
    queue_.push_back({work, fingerprint, timeout, std::move(body)});
    queue_grew_.notify_one();
    return work;
  }

  void work_off_queue() {
    const BlockSigpipe block;  // the carrier may write here, too
    std::exception_ptr failure;
    for (;;) {
      Queued next;
      {
        std::unique_lock lock(mutex_);
        queue_grew_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) break;
        next = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!failure) failure = run(next);
      next.work->complete(failure);
    }
    if (!failure_->happened() && !given_up()) take_leave();
    transport_.close();
  }

  /// Null after success; else the group has failed.
  std::exception_ptr run(const Queued& next) {
    const Deadline deadline(next.timeout);
    try {
      if (context_.liveness) {
        context_.liveness->set_progress(*next.work->context().sequence);
      }
      try {
        if (check_) algorithms_->compare(next.fingerprint, deadline);
        next.body(deadline);
        return nullptr;
      } catch (const ExchangeError& error) {
        ErrorContext context = next.work->context();
        context.elapsed = deadline.elapsed();
        throw_converted(error, deadline, std::move(context));
      } catch (const MismatchError& error) {
        ErrorContext context = next.work->context();
        context.peers = error.context().peers;
        throw MismatchError(error.message(), std::move(context));
      } catch (const PeerLost& error) {
        ErrorContext context = next.work->context();
        context.peers = error.context().peers;
        throw PeerLost(error.message(), std::move(context));
      }
    } catch (const std::exception& error) {
      failure_->note(std::current_exception());
      transport_.close();
      messenger_->abort(std::string("the group failed: ") + error.what());
      return std::current_exception();
    }
  }

  [[nodiscard]] bool given_up() const {
    return aborted_.load() ||
           (context_.liveness &&
            (context_.liveness->failure() || context_.liveness->timed_out({})));
  }

  [[noreturn]] void throw_converted(const ExchangeError& error,
                                    const Deadline& deadline,
                                    ErrorContext context) const {
    if (aborted_.load()) {
      throw BackendError("the group was aborted", std::move(context));
    }
    // The carrier may see a death before it is on record.
    if (context_.liveness) {
      throw_verdict(*context_.liveness,
                    error.missing,
                    context,
                    deadline.passed() ? 0ms : kVerdictTime);
    }
    if (deadline.passed()) throw_timeout(error.missing, std::move(context));
    context.peers = global_ranks(error.missing);
    throw BackendError(name_ + " failed: " + error.what(), std::move(context));
  }

  /// Names whom an operation waited for until its deadline: who does not
  /// answer, else who has not come to it, else `missing`, whose messages are
  /// outstanding.
  [[noreturn]] void throw_timeout(std::vector<int> missing,
                                  ErrorContext context) const {
    std::string problem = " did not take part until the end";
    if (const auto& liveness = context_.liveness) {
      const auto progress = liveness->ask_progress(kAnswerTime);
      throw_verdict(*liveness, missing, context, 0ms);
      std::vector<int> silent;
      std::vector<int> behind;
      for (int rank = 0; rank < size_; ++rank) {
        if (liveness->has_left(rank)) continue;
        if (!progress[rank]) {
          silent.push_back(rank);
        } else if (*progress[rank] < *context.sequence) {
          behind.push_back(rank);
        }
      }
      if (!silent.empty()) {
        problem = " did not answer";
        missing = silent;
      } else if (!behind.empty()) {
        problem = " did not make this call";
        missing = behind;
      }
      if (!missing.empty()) liveness->announce_timeout(missing);
    }
    context.peers = global_ranks(missing);
    throw TimeoutError(list_of(global_ranks(missing)) + problem +
                           " in time; look there for a process that is "
                           "stopped, slower or in other code, or raise the "
                           "timeout",
                       std::move(context));
  }

  void stop() {
    messenger_->finish();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      queue_grew_.notify_one();
    }
    const std::lock_guard lock(stop_mutex_);
    if (!worker_.joinable()) return;
    worker_.join();
    if (context_.liveness) context_.liveness->unsubscribe(subscription_);
  }

  /// Waits a moment until the peers are done, too. Whatever happens is no
  /// concern of a rank that leaves.
  void take_leave() noexcept {
    try {
      algorithms_->compare({.operation = Operation::kDestroyProcessGroup},
                           Deadline(kFarewellTime));
      transport_.shutdown();
    } catch (const std::exception&) {
      return;
    }
  }

  const std::string name_;
  const BackendContext context_;
  const bool check_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<bool> aborted_{false};
  const std::shared_ptr<FirstFailure> failure_;
  const std::shared_ptr<CarriedMessenger> messenger_;
  Transport transport_;
  const std::unique_ptr<Algorithms> algorithms_;
  uint64_t subscription_ = 0;

  std::mutex mutex_;
  std::condition_variable queue_grew_;
  std::deque<Queued> queue_;
  uint64_t sequence_ = 0;
  bool stopping_ = false;

  std::mutex stop_mutex_;
  std::thread worker_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_carried_backend(
    const std::string& name,
    const BackendContext& context,
    c10::intrusive_ptr<c10d::Backend> carrier,
    bool exact_sizes,
    std::shared_ptr<const Hosts> hosts) {
  return c10::make_intrusive<CarriedBackend>(
      name, context, std::move(carrier), exact_sizes, std::move(hosts));
}

void throw_verdict(const Liveness& liveness,
                   const std::vector<int>& waiting_for,
                   const ErrorContext& context,
                   std::chrono::milliseconds limit) {
  const Deadline deadline(limit);
  for (;;) {
    // First: who gave up may have left since.
    if (auto timed_out = liveness.timed_out(context)) throw *timed_out;
    if (auto lost = liveness.peer_lost(waiting_for, context)) throw *lost;
    if (deadline.passed()) return;
    std::this_thread::sleep_for(1ms);
  }
}

}  // namespace lockstep::comm::carried
