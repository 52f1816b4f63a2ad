-- KEYS: none.  Reply: the revision of this library's text; see library.py.
redis.register_function{ function_name = 'octavo1_revision', callback = function() return REVISION end, flags = { 'no-writes' } }

-- KEYS: none.  Reply: the oldest revision whose programs these functions serve.
redis.register_function{ function_name = 'octavo1_serves', callback = function() return SERVES end, flags = { 'no-writes' } }
