#include "comm/store_texts.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "lockstep/core/error.h"

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kSlice(50);

bool arrive_within(c10d::Store& store,
                   const std::vector<std::string>& keys,
                   std::chrono::milliseconds limit) {
  try {
    // Zero would mean to wait for ever.
    store.wait(keys, std::max(limit, std::chrono::milliseconds(1)));
    return true;
  } catch (const c10::DistStoreError&) {
    return false;
  }
}

void check_all_there(c10d::Store& store,
                     const std::vector<std::string>& keys,
                     const std::vector<int>& ranks,
                     const Deadline& deadline) {
  ErrorContext context{.elapsed = deadline.elapsed()};
  std::string names;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (store.check({keys[i]})) continue;
    context.peers.push_back(ranks[i]);
    names += (names.empty() ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (names.empty()) return;
  throw TimeoutError("rank " + names +
                         " did not arrive; look at its own output, and "
                         "whether it was started at all",
                     context);
}

std::string text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void with_store(const std::function<void()>& use) {
  try {
    use();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw StoreError(std::string("the store was lost: ") + error.what());
  }
}

void set_text(c10d::Store& store,
              const std::string& key,
              const std::string& text) {
  with_store(
      [&] { store.set(key, std::vector<uint8_t>(text.begin(), text.end())); });
}

std::vector<std::string> texts_of(
    c10d::Store& store,
    const std::vector<int>& ranks,
    const std::function<std::string(int rank)>& key_of,
    const Deadline& deadline,
    const std::function<void()>& look) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) keys.push_back(key_of(rank));
  std::vector<std::string> texts;
  texts.reserve(keys.size());
  with_store([&] {
    while (
        !arrive_within(store, keys, std::min(deadline.remaining(), kSlice))) {
      look();
      if (deadline.passed()) check_all_there(store, keys, ranks, deadline);
    }
    if (store.hasExtendedApi()) {
      for (const auto& value : store.multiGet(keys)) {
        texts.push_back(text(value));
      }
    } else {
      for (const auto& key : keys) texts.push_back(text(store.get(key)));
    }
  });
  return texts;
}

}  // namespace lockstep::comm
