#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

// The virtual table goes on with these members.
#define GLOO_STORE_HAS_STORE_V2

namespace gloo::rendezvous {

// The order of the members is that of the virtual table of
// c10d::ProcessGroupGloo::GlooStore inside libtorch.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual std::vector<char> wait_get(const std::string& key,
                                     const std::chrono::milliseconds& timeout) {
    wait({key}, timeout);
    return get(key);
  }
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
  virtual bool has_v2_support() = 0;
  virtual std::vector<std::vector<char>> multi_get(
      const std::vector<std::string>& keys) = 0;
  virtual void multi_set(const std::vector<std::string>& keys,
                         const std::vector<std::vector<char>>& values) = 0;
  virtual void append(const std::string& key,
                      const std::vector<char>& value) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
};

}  // namespace gloo::rendezvous
