#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "core/clock.h"
#include "lockstep/core/error.h"
#include "rendezvous/call_thread.h"

namespace lockstep::rendezvous {

/// "the store at 127.0.0.1:29500" or "the store in /tmp/file".
std::string describe(const c10::intrusive_ptr<c10d::Store>& store);

/// The error of a store that kept silent until `deadline`.
StoreError silent_store(const std::string& store,
                        const Deadline& deadline,
                        ErrorContext context);

/// The same key space as another store, but its calls end with StoreError when
/// the store's server is lost, and soon after a deadline even if it is stopped:
/// libtorch's own wait for an answer without limit. A PrefixStore only so that
/// what looks for the store below finds it.
class BoundedStore final : public c10d::PrefixStore {
 public:
  BoundedStore(c10::intrusive_ptr<c10d::Store> store,
               const Deadline& deadline,
               ErrorContext context);

  /// From now on calls go straight to the store and take as long as it does.
  void lift_bound() noexcept;

  c10::intrusive_ptr<Store> clone() override;
  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using PrefixStore::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  int64_t getNumKeys() override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key,
              const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  void queuePush(const std::string& key,
                 const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

 private:
  /// `call` takes the store and holds copies of its arguments.
  template <class F>
  auto bounded(F call);

  const Deadline deadline_;
  const ErrorContext context_;
  std::unique_ptr<CallThread> thread_;  ///< null: no bound any more
};

}  // namespace lockstep::rendezvous
