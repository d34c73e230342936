// A problem and its parts in words, and back.
#pragma once

#include <string>

#include "core/problem.h"

namespace fastconv {

const char* name_of(DType dtype);
const char* name_of(AccuracyClass accuracy);
const char* name_of(Layout layout);
const char* name_of(Activation activation);
const char* name_of(Shuffle shuffle);

// The inverse of name_of; throws InvalidArgument naming the argument, the value and the expected ones.
AccuracyClass accuracy_from_name(const std::string& name);
Activation activation_from_name(const std::string& name);
Layout layout_from_name(const std::string& name);
Shuffle shuffle_from_name(const std::string& name);
DType dtype_from_name(const std::string& name);

std::string to_string(const ConvProblem& problem);

}  // namespace fastconv
