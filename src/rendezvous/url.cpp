#include "rendezvous/url.h"

#include <charconv>
#include <climits>

#include "lockstep/core/error.h"

namespace lockstep::rendezvous {
namespace {

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Url run() {
    std::string rest = text_;
    if (const auto query = rest.find('?'); query != std::string::npos) {
      parse_query(rest.substr(query + 1));
      rest.resize(query);
    }
    const auto separator = rest.find("://");
    if (separator == std::string::npos) fail("has no \"://\"");
    const std::string scheme = rest.substr(0, separator);
    rest.erase(0, separator + 3);
    if (scheme == "env") {
      url_.scheme = Url::Scheme::Env;
    } else if (scheme == "tcp") {
      url_.scheme = Url::Scheme::Tcp;
      parse_endpoint(rest);
    } else if (scheme == "file") {
      url_.scheme = Url::Scheme::File;
      if (rest.empty() || rest.front() != '/') fail("has no absolute path");
      url_.path = rest;
    } else {
      fail("has an unknown scheme");
    }
    return url_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InvalidArgument("init_method \"" + text_ + "\" " + what +
                              "; give env://, tcp://host:port or "
                              "file:///path, with ?rank=R&world_size=W where "
                              "the environment does not tell them",
                          {.operation = "init_process_group"});
  }

  int number(const std::string& text, int minimum, int maximum) const {
    int value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < minimum ||
        value > maximum) {
      fail("has \"" + text + "\" where a number from " +
           std::to_string(minimum) + " to " + std::to_string(maximum) +
           " belongs");
    }
    return value;
  }

  void parse_endpoint(std::string rest) {
    while (!rest.empty() && rest.back() == '/') rest.pop_back();
    const auto colon = rest.rfind(':');
    if (colon == std::string::npos || rest.back() == ']') fail("has no port");
    url_.host = rest.substr(0, colon);
    if (url_.host.size() > 1 && url_.host.front() == '[' &&
        url_.host.back() == ']') {
      url_.host = url_.host.substr(1, url_.host.size() - 2);
    }
    if (url_.host.empty()) fail("has no host");
    url_.port = static_cast<uint16_t>(number(rest.substr(colon + 1), 1, 65535));
  }

  void parse_query(const std::string& query) {
    for (size_t start = 0; start < query.size();) {
      const auto end = std::min(query.find('&', start), query.size());
      const std::string item = query.substr(start, end - start);
      const auto equal = std::min(item.find('='), item.size());
      const std::string key = item.substr(0, equal);
      const std::string value =
          equal < item.size() ? item.substr(equal + 1) : "";
      if (key == "rank") {
        url_.rank = number(value, 0, INT_MAX);
      } else if (key == "world_size") {
        url_.world_size = number(value, 1, INT_MAX);
      } else if (key != "use_libuv") {  // Python's; no meaning here
        fail("has the unknown setting \"" + key + '"');
      }
      start = end + 1;
    }
  }

  const std::string& text_;
  Url url_;
};

}  // namespace

Url parse_url(const std::string& text) {
  return Parser(text).run();
}

}  // namespace lockstep::rendezvous
