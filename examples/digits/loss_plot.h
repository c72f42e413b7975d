#pragma once

#include <string>
#include <vector>

/// Draws the loss of each step as an SVG picture.
/// \throws std::runtime_error when the file cannot be written
void write_loss_plot(const std::string& path,
                     const std::vector<double>& losses,
                     int epochs);
