#include "rendezvous/bounded_store.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rendezvous/address.h"

namespace lockstep::rendezvous {
namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

}  // namespace

std::string describe(const c10::intrusive_ptr<c10d::Store>& store) {
  auto base = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(base.get())) {
    base = prefixed->getUnderlyingNonPrefixStore();
  }
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get())) {
    return "the store at " + to_string(tcp->getHost(), tcp->getPort());
  }
  if (const auto* file = dynamic_cast<const c10d::FileStore*>(base.get())) {
    return "the store in " + file->getPath();
  }
  return "the store";
}

StoreError silent_store(const std::string& store,
                        const Deadline& deadline,
                        ErrorContext context) {
  context.elapsed = deadline.elapsed();
  return StoreError(store +
                        " does not answer: look whether rank 0 or the launcher "
                        "that serves it is stopped, and whether another "
                        "program uses that address (then choose another "
                        "MASTER_PORT)",
                    std::move(context));
}

BoundedStore::BoundedStore(c10::intrusive_ptr<c10d::Store> store,
                           const Deadline& deadline,
                           ErrorContext context)
    : PrefixStore("", std::move(store)),
      deadline_(deadline),
      context_(std::move(context)),
      thread_(std::make_unique<CallThread>()) {
}

void BoundedStore::lift_bound() noexcept {
  thread_.reset();
}

template <class F>
auto BoundedStore::bounded(F call) {
  if (!thread_) return call(*store_);
  auto result =
      thread_->run([store = store_, call] { return call(*store); }, deadline_);
  if (!result.valid()) {
    throw silent_store(describe(store_), deadline_, context_);
  }
  try {
    return result.get();
  } catch (const c10::DistNetworkError& error) {
    throw StoreError(describe(store_) +
                         " was lost; look whether rank 0 or the launcher that "
                         "serves it has ended: " +
                         error.what_without_backtrace(),
                     context_);
  }
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  return store_->clone();
}

void BoundedStore::set(const std::string& key, const Bytes& value) {
  bounded([key, value](Store& store) { store.set(key, value); });
}

Bytes BoundedStore::compareSet(const std::string& key,
                               const Bytes& expected,
                               const Bytes& desired) {
  return bounded([key, expected, desired](Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

Bytes BoundedStore::get(const std::string& key) {
  return bounded([key](Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  return bounded([key, value](Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return bounded([key](Store& store) { return store.deleteKey(key); });
}

int64_t BoundedStore::getNumKeys() {
  return bounded([](Store& store) { return store.getNumKeys(); });
}

bool BoundedStore::check(const Keys& keys) {
  return bounded([keys](Store& store) { return store.check(keys); });
}

void BoundedStore::wait(const Keys& keys) {
  bounded([keys](Store& store) { store.wait(keys); });
}

void BoundedStore::wait(const Keys& keys,
                        const std::chrono::milliseconds& timeout) {
  bounded([keys, timeout](Store& store) { store.wait(keys, timeout); });
}

void BoundedStore::append(const std::string& key, const Bytes& value) {
  bounded([key, value](Store& store) { store.append(key, value); });
}

std::vector<Bytes> BoundedStore::multiGet(const Keys& keys) {
  return bounded([keys](Store& store) { return store.multiGet(keys); });
}

void BoundedStore::multiSet(const Keys& keys,
                            const std::vector<Bytes>& values) {
  bounded([keys, values](Store& store) { store.multiSet(keys, values); });
}

void BoundedStore::queuePush(const std::string& key, const Bytes& value) {
  bounded([key, value](Store& store) { store.queuePush(key, value); });
}

Bytes BoundedStore::queuePop(const std::string& key, bool block) {
  return bounded(
      [key, block](Store& store) { return store.queuePop(key, block); });
}

int64_t BoundedStore::queueLen(const std::string& key) {
  return bounded([key](Store& store) { return store.queueLen(key); });
}

std::vector<std::string> BoundedStore::listKeys() {
  return bounded([](Store& store) { return store.listKeys(); });
}

}  // namespace lockstep::rendezvous
