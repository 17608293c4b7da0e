// A test is a program: it prints what was not as expected and returns how often.
#ifndef MHT_TESTS_EXPECT_H_
#define MHT_TESTS_EXPECT_H_

#include <stdio.h>

namespace mht {

inline int failures = 0;

inline bool expect(bool good, const char* what, const char* file, int line) {
  if (!good) {
    fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
    ++failures;
  }
  return good;
}

}  // namespace mht

#define EXPECT(condition) mht::expect((condition), #condition, __FILE__, __LINE__)

#endif  // MHT_TESTS_EXPECT_H_
