// Whether Python objects are as they were: a pass over dictionaries in C, which a call of a compiled model can afford.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

namespace py = pybind11;

void bind_snapshot(py::module_& module);

namespace {

// Which objects dictionaries hold under which keys, in their order, and of others, `owners`, how many, and which under
// one key. What was seen is kept alive, so that nothing new can have its address.
class Snapshot {
 public:
  Snapshot(const py::list& dictionaries, const py::str& key, const py::list& owners) : key_(key) {
    for (py::handle each : dictionaries) {
      const auto live = py::reinterpret_borrow<py::dict>(each);
      for (const auto& [its_key, its_value] : live) {
        seen_.push_back(py::reinterpret_borrow<py::object>(its_key));
        seen_.push_back(py::reinterpret_borrow<py::object>(its_value));
      }
      dictionaries_.push_back({live, live.size()});
    }
    for (py::handle each : owners) {
      const auto owner = py::reinterpret_borrow<py::dict>(each);
      owners_.push_back({{owner, owner.size()}, owner.contains(key) ? py::object(owner[key]) : py::object()});
    }
  }

  bool holds() const {
    const py::object* expected = seen_.data();
    for (const Dictionary& dictionary : dictionaries_) {
      if (!has_its_size(dictionary)) return false;
      if (dictionary.size == 0) continue;
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(dictionary.live.ptr(), &position, &key, &value) != 0) {
        if (key != expected[0].ptr() || value != expected[1].ptr()) return false;
        expected += 2;
      }
    }
    for (const Owner& owner : owners_) {
      if (!has_its_size(owner.dictionary)) return false;
      if (PyDict_GetItem(owner.dictionary.live.ptr(), key_.ptr()) != owner.value.ptr()) return false;
    }
    return true;
  }

 private:
  struct Dictionary {
    py::dict live;
    std::size_t size;
  };
  struct Owner {
    Dictionary dictionary;
    py::object value;
  };

  static bool has_its_size(const Dictionary& dictionary) {
    return static_cast<std::size_t>(PyDict_GET_SIZE(dictionary.live.ptr())) == dictionary.size;
  }

  std::vector<Dictionary> dictionaries_;
  std::vector<py::object> seen_;  // their keys and values in turn
  py::str key_;
  std::vector<Owner> owners_;
};

}  // namespace

void bind_snapshot(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot",
                       "What dictionaries hold, and of further ones, `owners`, how much, and what under one key.")
      .def(py::init<const py::list&, const py::str&, const py::list&>(), py::arg("dictionaries"), py::arg("key"),
           py::arg("owners"))
      .def("holds", &Snapshot::holds, "Whether all of it is the same objects still.");
}
