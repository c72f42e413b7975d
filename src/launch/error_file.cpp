#include "launch/error_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "lockstep/core/error.h"

namespace lockstep::launcher {
namespace {

constexpr size_t kMaxBytes = 64 * 1024;

/// The JSON string that begins at `text[start]`, behind its quotation mark.
/// Escapes of characters outside ASCII become '?'.
std::string json_string(const std::string& text, size_t start) {
  std::string value;
  for (size_t i = start; i < text.size() && text[i] != '"'; ++i) {
    if (text[i] != '\\') {
      value += text[i];
      continue;
    }
    if (++i == text.size()) break;
    switch (text[i]) {
      case 'n':
        value += '\n';
        break;
      case 't':
        value += '\t';
        break;
      case 'u':
        value += '?';
        i += 4;
        break;
      default:
        value += text[i];
    }
  }
  return value;
}

}  // namespace

ErrorFile::ErrorFile() : fd_(::memfd_create("lockstep-error", MFD_CLOEXEC)) {
  if (!fd_) {
    throw LaunchError("cannot make a worker's error file: " +
                      std::generic_category().message(errno));
  }
}

std::string ErrorFile::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" +
         std::to_string(fd_.get());
}

std::string ErrorFile::message() const {
  std::string bytes(kMaxBytes, '\0');
  const ssize_t size = ::pread(fd_.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return error_message(bytes);
}

std::string error_message(const std::string& json) {
  static const std::string kKey = "\"message\":";
  size_t position = json.find(kKey);
  while (position != std::string::npos) {
    position = json.find_first_not_of(" \n\t", position + kKey.size());
    if (position == std::string::npos) break;
    if (json[position] == '"') return json_string(json, position + 1);
    position = json.find(kKey, position);
  }
  return {};
}

}  // namespace lockstep::launcher
