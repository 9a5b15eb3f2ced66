#pragma once

#include <string>
#include <vector>

#include "core/config/schema.h"
#include "core/config/value.h"

namespace graft {

// All throw Error(usage) "WHERE: NAME: expected ..., got ..."; where WHERE is a flag, without NAME.

// `value` as the type of `name`: whole numbers serve as numbers, one string as a list of strings,
// an empty list as any list. Nothing else is converted.
ConfigValue coerce(ConfigValue value, ValueType type, const std::string& name,
                   const std::string& where);

// Range and choice of a value that has the key's type.
void check_allowed(const ConfigValue& value, const Key& key, const std::string& where);

// The words behind a flag as a value of `type`.
ConfigValue parse_words(const std::vector<std::string>& words, ValueType type,
                        const std::string& name, const std::string& where);

}  // namespace graft
