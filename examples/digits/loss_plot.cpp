#include "loss_plot.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace {

constexpr int kWidth = 640;
constexpr int kHeight = 360;
constexpr int kLeft = 56;
constexpr int kRight = 16;
constexpr int kTop = 32;
constexpr int kBottom = 44;

/// Maps [0, `range`] onto [`from`, `to`].
struct Scale {
  double range;
  double from;
  double to;
  double operator()(double value) const {
    return from + (to - from) * value / range;
  }
};

std::string text(double x,
                 double y,
                 const std::string& anchor,
                 const std::string& words) {
  std::ostringstream out;
  out << "<text x='" << x << "' y='" << y << "' text-anchor='" << anchor << "'>"
      << words << "</text>\n";
  return out.str();
}

std::string number(double value) {
  std::ostringstream out;
  out.precision(2);
  out << value;
  return out.str();
}

}  // namespace

void write_loss_plot(const std::string& path,
                     const std::vector<double>& losses,
                     int epochs) {
  const double highest = *std::max_element(losses.begin(), losses.end());
  const Scale x{static_cast<double>(losses.size() - 1), kLeft, kWidth - kRight};
  const Scale y{highest, kHeight - kBottom, kTop};
  const Scale epoch{static_cast<double>(epochs), kLeft, kWidth - kRight};

  std::ofstream out(path);
  out << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 " << kWidth
      << ' ' << kHeight << "' width='" << kWidth << "' height='" << kHeight
      << "' font-family='sans-serif' font-size='12' fill='#333'>\n"
      << "<rect width='100%' height='100%' fill='white'/>\n"
      << text(kWidth / 2.0, 20, "middle", "training loss")
      << text(kWidth / 2.0, kHeight - 8, "middle", "epoch");
  for (int i = 0; i <= 4; ++i) {
    const double value = highest * i / 4;
    out << "<line x1='" << kLeft << "' x2='" << kWidth - kRight << "' y1='"
        << y(value) << "' y2='" << y(value) << "' stroke='#ddd'/>\n"
        << text(kLeft - 8, y(value) + 4, "end", number(value));
  }
  for (int i = 0; i <= epochs; ++i) {
    out << text(epoch(i), kHeight - kBottom + 16, "middle", std::to_string(i));
  }
  out << "<polyline fill='none' stroke='#d33' stroke-width='1.5' points='";
  for (size_t i = 0; i < losses.size(); ++i) {
    out << x(static_cast<double>(i)) << ',' << y(losses[i]) << ' ';
  }
  out << "'/>\n</svg>\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}
