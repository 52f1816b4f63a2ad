"""Templates that would take for ever, or all memory, each by another means that jinja2 gives them."""

GROWING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = WHAT %}{% endfor %}{{ n.x | length }}"
# Forty lists, one in the other twice each: they are small, and whoever walks through them visits 2 ** 40.
NESTED = (
    "{% set n = namespace(a=[], b=[]) %}{% for i in range(40) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
TUPLES = NESTED.replace("=[]", "=()").replace("[n.a, n.a]", "(n.a, n.a)").replace("[n.b, n.b]", "(n.b, n.b)")
DICTS = NESTED.replace("[n.a, n.a]", "{1: n.a, 2: n.a}").replace("[n.b, n.b]", "{1: n.b, 2: n.b}")
TEXT = "{% set s = 'ab' * 8000000 %}"

HOSTILE = {
    # steps
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a text": "{% set s = 'a' * 99999 %}{% for i in s %}{% for j in s %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a loop that is its own": "{% for i in [[1]] * 9 recursive %}{{ loop([i] * 9) if loop.depth0 < 9 }}{% endfor %}",
    "macros that call themselves": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "macros that fan out": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "callers that fan out": "{% macro f(n) %}{% if n %}{{ caller(n) }}{{ caller(n) }}{% endif %}{% endmacro %}"
    "{% macro g(n) %}{% call(m) f(n) %}{{ g(m - 1) }}{% endcall %}{% endmacro %}{{ g(60) }}",
    "a loop in a filter": "{{ range(99999) | map('pprint') | map('list') | map('join') | list | string | length * 0 }}"
    "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length * 0 }}{% endfor %}",
    "a loop in select": "{% for i in range(99999) %}{{ range(99999) | select('odd') | list | length * 0 }}{% endfor %}",
    "a loop in groupby": "{% for i in range(99999) %}{{ [{'a': 1}] * 99999 | groupby('a') | length }}{% endfor %}",
    "texts that are compared": TEXT
    + "{% set t = s ~ '' %}{% for i in range(99999) %}{{ (s == t) | int * 0 }}{% endfor %}",
    "texts that are searched": TEXT + "{% for i in range(99999) %}{{ s.count('ba' * 4000) * 0 }}{% endfor %}",
    "texts that are split": "{% for i in range(99999) %}{{ ('a ' * 99999).split() | length * 0 }}{% endfor %}",
    "words that are counted": "{% for i in range(99999) %}{{ (('a ' ~ i) * 99999) | wordcount * 0 }}{% endfor %}",
    "tags that are stripped": "{{ ('<' * 999999) | striptags }}{{ ('<!--' * 999999) | striptags }}",
    "links that are found": "{{ ('http://' ~ 'a.' * 99999 ~ ' ') * 99 | urlize }}",
    # what walks through nested values
    "==": NESTED + "{{ n.a == n.b }}",
    "!=": NESTED + "{{ n.a != n.b }}",
    "<": NESTED + "{{ n.a < n.b }}",
    ">=": NESTED + "{{ n.a >= n.b }}",
    "in": NESTED + "{{ n.a in [n.b] }}",
    "not in": NESTED + "{{ n.a not in [n.b] }}",
    "is eq": NESTED + "{{ n.a is eq(n.b) }}",
    "is in": NESTED + "{{ n.a is in([n.b]) }}",
    "is lt": NESTED + "{{ n.a is lt(n.b) }}",
    "sort": NESTED + "{{ [n.a, n.b] | sort | length }}",
    "min": NESTED + "{{ [n.a, n.b] | min | length }}",
    "max": NESTED + "{{ [n.a, n.b] | max | length }}",
    "select": NESTED + "{{ [n.a] | select('equalto', n.b) | list | length }}",
    "rejectattr": NESTED + "{{ [{'x': n.a}] | rejectattr('x', 'equalto', n.b) | list | length }}",
    "groupby": NESTED + "{{ [{'x': n.a}, {'x': n.b}] | groupby('x') | length }}",
    "index": NESTED + "{{ [n.a].index(n.b) }}",
    "count": NESTED + "{{ [n.a].count(n.b) }}",
    "tuples that are compared": TUPLES + "{{ n.a == n.b }}",
    "keys": TUPLES + "{{ {n.a: 1}[n.b] }}",
    "unique": TUPLES + "{{ [n.a, n.b] | unique | list | length }}",
    "a tuple in a dictionary": TUPLES + "{{ n.a in {1: 2} }}",
    "dictionaries that are compared": DICTS + "{{ n.a == n.b }}",
    "dictionaries as a text": DICTS + "{{ n.a | string | length }}",
    "lists as a text": NESTED + "{{ n.a | string | length }}",
    "lists in an output": NESTED + "{{ n.a }}",
    "lists by ~": NESTED + "{{ (n.a ~ '') | length }}",
    "lists by %": NESTED + "{{ ('%s' % (n.a,)) | length }}",
    "lists by format": NESTED + "{{ '{}'.format(n.a) | length }}",
    "lists as JSON": NESTED + "{{ n.a | tojson | length }}",
    "lists by pprint": NESTED + "{{ n.a | pprint | length }}",
    "lists by join": NESTED + "{{ [n.a] | join | length }}",
    "lists by urlencode": NESTED + "{{ {'a': n.a} | urlencode | length }}",
    "lists as attributes": NESTED + "{{ {'a': n.a} | xmlattr | length }}",
    "lists that are escaped": NESTED + "{{ n.a | escape | length }}",
    # growth
    "doubling by ~": GROWING.replace("WHAT", "n.x ~ n.x"),
    "doubling by +": GROWING.replace("WHAT", "n.x + n.x"),
    "doubling a list": GROWING.replace("'ab'", "[1, 2]").replace("WHAT", "n.x + n.x"),
    "doubling by sum": GROWING.replace("'ab'", "[1, 2]").replace("WHAT", "[n.x, n.x] | sum(start=[])"),
    "doubling by *": GROWING.replace("WHAT", "n.x * 2"),
    "doubling by %": GROWING.replace("WHAT", "'%s%s' % (n.x, n.x)"),
    "doubling by the method format": GROWING.replace("WHAT", "'{0}{0}'.format(n.x)"),
    "doubling by format_map": GROWING.replace("WHAT", "'{a}{a}'.format_map({'a': n.x})"),
    "doubling by the filter format": GROWING.replace("WHAT", "'%s%s' | format(n.x, n.x)"),
    "doubling by join": GROWING.replace("WHAT", "[n.x, n.x] | join"),
    "doubling by the method join": GROWING.replace("WHAT", "n.x.join([n.x, n.x])"),
    "doubling by replace": GROWING.replace("WHAT", "n.x.replace('', n.x)"),
    "doubling by the filter replace": GROWING.replace("WHAT", "n.x | replace('a', n.x)"),
    "doubling by translate": GROWING.replace("WHAT", "n.x.translate({97: n.x, 98: n.x})"),
    "doubling by a block": GROWING.replace("{% set n.x = WHAT %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + GROWING.replace("WHAT", "f(n.x)"),
    "doubling by indent": GROWING.replace("'ab'", "'a\n' * 999").replace("WHAT", "n.x | indent(n.x | length)"),
    "doubling by JSON": GROWING.replace("WHAT", "(n.x, n.x) | tojson"),
    "a loop that writes": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a text in pieces": TEXT + "{{ s | batch(1) | list | length }}",
    "a text as a list": TEXT + "{{ (s | list) * 9 | length }}",
    "a text in slices": TEXT + "{{ s | slice(8000000) | list | length }}",
    "a text that is reversed": TEXT * 9 + "{% set l = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set l.x = [l.x, s | reverse ~ i] %}{% endfor %}{{ l.x[0] | length }}",
    "parts of a text": TEXT + "{% set l = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set l.x = [l.x, s[i:]] %}{% endfor %}{{ l.x | length }}",
    "a list of lists as a text": "{{ [range(99999) | list] * 99999 }}",
    # sizes by an argument
    "a great text": "{{ 'x' * 10 ** 10 }}",
    "a great list": "{% set x = [0] * 10 ** 9 %}",
    "a great range": "{{ (range(99999) | list) * 99999 | length }}",
    "a great number": "{{ 10 ** (10 ** 9) }}",
    "a great number by an argument": "{% set n = messages | length * 10 ** 8 %}{{ (7 ** n) | length }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "powers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x ** 3 %}{% endfor %}",
    "remainders": "{% set a = 7 ** 400000 %}{% set b = 3 ** 300000 %}{% for i in range(9999) %}{% set c = a % b %}"
    "{% endfor %}",
    "a width in a format": "{{ '%999999999d' % 1 }}",
    "a width as an argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "digits of a number": "{{ '%.999999999f' % 1 }}",
    "a width in the method format": "{{ '{:>999999999}'.format(1) }}",
    "a nested width": "{{ '{:>{}}'.format(1, 10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "indent": "{{ ('a\n' * 999) | indent(10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "lipsum": "{{ lipsum(10 ** 7) }}",
    "a long date": "{{ strftime_now('%A' * 5000000) }}",
    "a cycle": "{% for i in range(99999) %}{{ loop.cycle(*range(99999)) * 0 }}{% endfor %}",
    "a cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{% set x = cycler(*range(99999)) %}"
    "{% endfor %}",
    "arguments": "{% macro f() %}{{ varargs | length * 0 }}{% endmacro %}"
    "{% for i in range(99999) %}{{ f(*range(99999)) }}{% endfor %}",
    # errors
    "a long error": "{{ raise_exception('x' * 9000000) }}",
    "a long name": "{{ messages['x' * 9000000].y }}",
    "a deep list": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "a deep list that is compared": "{% set n = namespace(x=[], y=[]) %}{% for i in range(99999) %}"
    "{% set n.x = [n.x] %}{% set n.y = [n.y] %}{% endfor %}{{ n.x == n.y }}",
}

# Of these, those that take memory before they take time.
LARGE = (
    "a text in pieces",
    "a text as a list",
    "a text in slices",
    "parts of a text",
    "doubling a list",
    "doubling by ~",
    "a list of lists as a text",
    "a great list",
    "a loop that writes",
    "batch",
    "lists in an output",
    "a long error",
    "a cycler",
)
